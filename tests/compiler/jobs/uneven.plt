# Digits on three processes; the last batch of an epoch is kept, and does not divide.
model {
  network = [conv2d(8, padding = 1), relu(), flatten(), linear(10)]
  loss    = cross_entropy()
}

data {
  source     = digits()
  batch      = 48
  validation = 20%
  last_batch = keep
}

devices {
  cpus = 3
}

parallelism {
  microbatches = 2
}

train {
  epochs    = 2
  optimizer = sgd(lr = 0.05, momentum = 0.9)
}
