# a character GPT, with a warm-up, decay of the matrices alone, and clipping
model {
  network = python("gpt:GPT")
  loss    = cross_entropy()
}

data {
  source  = python("gpt:Characters")
  batch   = 8
  shuffle = false
}

train {
  steps       = 12
  optimizer   = adamw(lr = 1e-3, betas = [0.9, 0.95], weight_decay = 0.1)
  no_decay    = ["*.bias", "*norm*"]
  lr_schedule = warmup_cosine(warmup = 3 steps)
  clip        = 1.0
}
