# 2,048 nodes of eight H100, all four axes.
model {
  network = gpt(layers = 126, width = 16_384, heads = 128, context = 8192, vocab = 128_256)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1_000_000, vocab = 128_256)
  batch  = 2048
}

devices {
  nodes = 2048
  gpus  = 8
  kind  = h100
}

parallelism {
  data         = 64
  zero         = 1
  pipeline     = 16
  context      = 2
  tensor       = 8
  schedule     = 1f1b
  microbatches = 32
}

memory {
  recompute = full
}

train {
  steps     = 1000
  precision = bf16
  optimizer = adamw(lr = 3e-4)
}
