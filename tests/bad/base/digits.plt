# What the bad jobs beside this folder start from: good as it is.
model {
  network = [flatten(), linear(10)]
  loss    = cross_entropy()
}

data {
  source     = digits()
  batch      = 64
  validation = 20%
}

devices {
  cpus = 2
}

train {
  epochs    = 5
  optimizer = sgd(lr = 0.1)
}
