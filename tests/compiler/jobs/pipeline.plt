# A byte-level GPT cut into two pipeline stages, two replicas of each.
model {
  network = gpt(layers = 4, width = 128, heads = 4, context = 128, vocab = 256)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1000, vocab = 256)
  batch  = 16
}

devices {
  cpus = 4
}

parallelism {
  data         = 2
  pipeline     = 2
  schedule     = 1f1b
  microbatches = 4
}

train {
  steps     = 100
  optimizer = adamw(lr = 1e-3)
}
