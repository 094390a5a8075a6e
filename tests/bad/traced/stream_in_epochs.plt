model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = python("streams:plain")
  batch  = 8
}

train {
  epochs    = 3 #! E0330
  optimizer = sgd(lr = 0.1)
}

checkpoint {
  every = 1 epoch #! E0330
}
