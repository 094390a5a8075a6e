# Many parameters and little arithmetic: what two hosts wait for is their network. exchanges.py trains it.
model {
  network = [flatten(), linear(1_024), relu(), linear(1_024), relu(), linear(10)]
  loss    = cross_entropy()
}

data {
  source = digits()
  batch  = 64
}

devices {
  nodes = 2
  cpus  = 1
}

train {
  steps     = 24
  optimizer = sgd(lr = 0.05)
}

log {
  every       = 1 step
  tensorboard = false
}
