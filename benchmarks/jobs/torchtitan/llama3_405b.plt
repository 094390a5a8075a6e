# A network of the size of Llama 3.1 405B: its 126 layers, width and heads, without gated networks and shared keys.
model {
  network = gpt(layers = 126, width = 16_384, heads = 128, context = 8192, vocab = 128_256, bias = false)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 100_000, vocab = 128_256)
  batch  = 256
}

devices {
  nodes     = 64
  gpus      = 8
  kind      = titan_h100
  catalogue = "h100.toml"
}

parallelism {
  pipeline     = 8
  tensor       = 8
  zero         = 2
  schedule     = 1f1b
  microbatches = 8
}

memory {
  recompute = full
}

train {
  steps     = 1_000
  precision = bf16(level = O2)
  optimizer = adamw(lr = 8e-5)
}
