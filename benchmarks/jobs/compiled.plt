# What compiled.py trains by hand: six equal blocks.
model {
  network = gpt(layers = 6, width = 128, heads = 4, context = 128, vocab = 256)
  loss    = cross_entropy()
}

data {
  source = stdlib()
  batch  = 16
}

devices {
  threads = 1
}

train {
  steps     = 40
  optimizer = adamw(lr = 1e-3)
  seed      = 1
  compile   = blocks
}

log {
  every       = 1_000 steps
  tensorboard = false
}
