# A Llama on eight GPUs: the tensor axis exchanges pieces of the sequence while it multiplies, by torch's compiler.
model {
  network = llama(layers = 8, width = 4096, heads = 32, kv_heads = 8, hidden = 14336, context = 8192)
  loss    = cross_entropy(chunks = auto)
}

data {
  source = synthetic(vocab = 128256)
  batch  = 8
}

devices {
  gpus = 8
  kind = "h100"
}

parallelism {
  tensor       = 4
  zero         = 3
  async_tensor = true
}

memory {
  recompute = selective
}

train {
  steps     = 1000
  optimizer = adamw(lr = 3e-4)
  precision = bf16
  compile   = blocks
}
