# A small DeepSeek-V3-like network: eight experts in each block but the first, of which a token uses two.
model {
  network = llama(
    layers = 3, width = 64, heads = 4, hidden = 192, context = 64, vocab = 256, dense_layers = 1,
    experts = moe(experts = 8, top_k = 2, hidden = 64, shared = 1, score = sigmoid, scale = 2.5, balance = bias(0.001)),
  )
  loss = cross_entropy()
}

data {
  source     = stdlib()
  batch      = 32
  validation = 1%
}

devices {
  cpus = 2
}

parallelism {
  zero = 2
}

train {
  steps     = 20
  optimizer = adamw(lr = 3e-3)
  clip      = 1.0
}

evaluate {
  metrics = [loss, perplexity]
}
