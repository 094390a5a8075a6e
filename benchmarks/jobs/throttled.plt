# Two data ranks of which the second has half a core, if the environment names a control group for it.
model {
  network = gpt(layers = 2, width = 128, heads = 4, context = 64, vocab = 256)
  loss    = cross_entropy()
}

data {
  source = python("throttled:source", samples = 2400, context = 64, vocab = 256)
  batch  = 96
}

devices {
  cpus    = 2
  threads = 1
}

train {
  steps     = 16
  optimizer = sgd(lr = 0.05)
  seed      = 1
}

log {
  every       = 1 step
  tensorboard = false
}
