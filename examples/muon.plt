# A byte-level GPT whose hidden matrices are updated by Muon, and embeddings, head and vectors by AdamW.
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
  zero = 1
}

train {
  steps       = 100
  optimizer   = muon(lr = 0.02, adamw_lr = 3e-3)
  lr_schedule = warmup_cosine(warmup = 10 steps)
  clip        = 1.0
}
