# 131,072 devices on four axes: what a plan of that size costs.
model {
  network = gpt(layers = 126, width = 16_384, heads = 128, context = 8192, vocab = 128_256)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1_000_000, vocab = 128_256)
  batch  = 16_384
}

devices {
  nodes = 16_384
  gpus  = 8
  kind  = h100
}

parallelism {
  data         = 512
  pipeline     = 16
  tensor       = 8
  context      = 2
  zero         = 1
  schedule     = interleaved_1f1b
  microbatches = 32
}

memory {
  recompute = full
}

train {
  steps     = 1_000
  precision = bf16
  optimizer = adamw(lr = 8e-5)
}
