# Few layers under a large vocabulary: equal numbers of layers leave the second stage with twice the work of the first.
model {
  network = gpt(layers = 4, width = 256, heads = 4, context = 128, vocab = 8192)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 4096, vocab = 8192)
  batch  = 16
}

devices {
  cpus = 2
}

parallelism {
  pipeline     = 2
  stages       = balanced
  microbatches = 8
}

train {
  steps     = 11
  optimizer = sgd(lr = 0.05)
  seed      = 1
}

log {
  every       = 1_000 steps
  tensorboard = false
}
