# What jobs with small networks of a user's own start from: good as it is.
model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 64, shape = [6], classes = 3)
  batch  = 8
}

devices {
  cpus = 2
}

train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
