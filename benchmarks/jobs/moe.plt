# What handwritten.py trains as `moe`.
model {
  network = llama(
    layers = 4, width = 128, heads = 4, context = 128, vocab = 256,
    experts = moe(experts = 8, top_k = 2, hidden = 128),
  )
  loss = cross_entropy()
}

data {
  source = stdlib()
  batch  = 16
}

devices {
  cpus = 2
}

train {
  steps     = 60
  optimizer = adamw(lr = 1e-3)
  seed      = 1
}

log {
  every       = 1_000 steps
  tensorboard = false
}
