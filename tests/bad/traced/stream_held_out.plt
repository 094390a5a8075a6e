model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source     = python("streams:plain")
  batch      = 8
  validation = 10% #! E0331
  last_batch = keep #! E0331
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
