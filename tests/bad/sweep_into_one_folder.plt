import "base/digits.plt"

sweep {
  train.seed = [0, 1]
}

checkpoint {
  every = 10 steps
  dir   = "of_all" #! E0145
}
