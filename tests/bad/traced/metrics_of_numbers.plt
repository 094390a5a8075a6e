import "../base/digits.plt"

model {
  network = [flatten(), linear(1)]
  loss    = python("losses:distance")
}

data {
  source     = python("losses:Numbers")
  validation = 10%
}

evaluate {
  metrics = [loss, mse, accuracy] #! E0691
}
