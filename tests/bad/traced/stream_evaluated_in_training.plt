model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = python("streams:plain")
  batch  = 8
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}

evaluate {
  start    = true
  training = true #! E0340
}
