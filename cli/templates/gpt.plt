# A byte-level GPT on the text of Python's own standard library, on two processes.
param width = 128

model {
  network = gpt(layers = 4, width = width, heads = 4, context = 128, vocab = 256)
  loss    = cross_entropy()
}

data {
  source     = stdlib()  # yours: text("file.txt")
  batch      = 16  # sequences
  validation = 1%
}

devices {
  cpus = 2
}

train {
  steps       = 200
  optimizer   = adamw(lr = 1e-3, weight_decay = 0.1)
  lr_schedule = warmup_cosine(warmup = 20 steps)
  clip        = 1.0
}

evaluate {
  every   = 100 steps
  metrics = [loss, perplexity]
}
