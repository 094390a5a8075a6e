# A byte-level Llama with grouped-query attention and Llama 3's rotary positions, over the tensor axis.
model {
  network = llama(
    layers = 2, width = 64, heads = 4, kv_heads = 2, hidden = 172, context = 64, vocab = 256,
    rope_theta = 500_000, rope_scaling = llama3(factor = 8, original_context = 32), norm_eps = 1e-5,
  )
  loss = cross_entropy()
}

data {
  source     = stdlib()
  batch      = 16
  validation = 1%
}

devices {
  cpus = 2
}

parallelism {
  tensor = 2
}

train {
  steps     = 30
  optimizer = adamw(lr = 3e-3, weight_decay = 0.1)
  clip      = 1.0
}
