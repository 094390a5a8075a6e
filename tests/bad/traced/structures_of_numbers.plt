import "../base/digits.plt"

model {
  network = python("structures:Beside")
  loss    = mse() #! E0322
}

data {
  source     = python("structures:Pairs")
  batch      = 8
  validation = 25%
}
