# What handwritten.py trains as `gpt2`: GPT-2 of 124 M parameters, on one GPU.
model {
  network = gpt(layers = 12, width = 768, heads = 12, context = 1024, vocab = 50_304, tie = true)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1024, vocab = 50_304)
  batch  = 16
}

devices {
  gpus = 1
}

train {
  steps     = 100
  optimizer = adamw(lr = 6e-4)
  precision = bf16
  compile   = true
  seed      = 1
}

log {
  every       = 1_000 steps
  tensorboard = false
}
