import "base/digits.plt"

parallelism {
  context = 2 #! E0418
}
