# A byte-level GPT whose dense layers multiply in 8 bits. CPUs emulate it; on GPUs leave `emulate` out.
model {
  network = gpt(layers = 2, width = 64, heads = 4, context = 64, vocab = 256)
  loss    = cross_entropy()
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
  zero = 2
}

train {
  steps       = 60
  optimizer   = adamw(lr = 3e-3)
  precision   = fp8(skip = ["head"], emulate = true)
  lr_schedule = warmup_cosine(warmup = 6 steps)
  clip        = 1.0
}
