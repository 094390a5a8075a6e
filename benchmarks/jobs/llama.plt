# A Llama of 125 M parameters, whose memory is predicted and measured on GPUs.
model {
  network = transformers("llama")
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 1024, vocab = 32_000, context = 1024)
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
