import "base/digits.plt"

checkpoint {
  every = 10 steps
  dir   = "kept" #! E0811
}
