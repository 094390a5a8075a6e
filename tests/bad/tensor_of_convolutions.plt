import "base/digits.plt"

parallelism {
  tensor = 2 #! E0416
}
