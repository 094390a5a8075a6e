model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source     = python("streams:parts")
  batch      = 8
  interleave = 4 #! E0332
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
