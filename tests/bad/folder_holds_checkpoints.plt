import "base/digits.plt"

checkpoint {
  every = 10 steps
  dir   = "kept" #! W0811
}
