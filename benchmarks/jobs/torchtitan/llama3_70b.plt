# A network of the size of Llama 3.1 70B: 80 layers of its width and heads, without its gated networks and shared keys.
model {
  network = gpt(layers = 80, width = 8192, heads = 64, context = 8192, vocab = 128_256, bias = false)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 100_000, vocab = 128_256)
  batch  = 512
}

devices {
  nodes     = 32
  gpus      = 8
  kind      = titan_h100
  catalogue = "h100.toml"
}

parallelism {
  tensor = 8
  zero   = 3
}

memory {
  recompute = full
}

train {
  steps     = 1_000
  precision = bf16(level = O2)
  optimizer = adamw(lr = 1.5e-4)
}
