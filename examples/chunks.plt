# A GPT with many classes: the head and the loss are computed in chunks of tokens, and whole logits never exist.
model {
  network = gpt(layers = 2, width = 64, heads = 4, context = 64, vocab = 4096)
  loss    = cross_entropy(chunks = auto)
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
