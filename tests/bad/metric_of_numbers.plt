import "base/digits.plt"

model {
  network = [linear(5)]
  loss    = cross_entropy() #! E0215
}

data {
  source = synthetic(shape = [6], targets = [5])
}

evaluate {
  metrics = [loss, mse, accuracy]
}
