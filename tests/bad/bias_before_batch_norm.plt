import "base/digits.plt"

devices {
  cpus = 2
}

model {
  network = [conv2d(4), batch_norm(), relu(), conv2d(4, bias = false), batch_norm(), flatten(), linear(10)]
}

train {
  optimizer = onebit_adam(freeze = 20) #! W0630 W0636
}
