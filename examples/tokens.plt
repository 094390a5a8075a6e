# A GPT on a file of tokens. Make the file first:
#   dslc tokens "$(python -c 'import os; print(os.path.dirname(os.__file__))')"/*.py -o tokens.bin
model {
  network = gpt(layers = 2, width = 64, heads = 4, context = 64, vocab = 256)
  loss    = cross_entropy()
}

data {
  source     = tokens("tokens.bin")
  batch      = 32
  validation = 2%
  workers    = 1
}

devices {
  cpus = 2
}

train {
  steps       = 200
  optimizer   = adamw(lr = 1e-3)
  lr_schedule = warmup_cosine(warmup = 20 steps)
  clip        = 1.0
}

evaluate {
  every   = 100 steps
  metrics = [loss, perplexity]
}
