model {
  network = gpt(layers = 4, width = 64, heads = 4, context = 32, vocab = 256)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 512, vocab = 256)
  batch  = 64
}

devices {
  gpus = 4
  kind = h100
}

parallelism {
  zero     = 3
  replicas = 2
}

train {
  steps     = 10
  optimizer = adamw(lr = 1e-3)
}
