# Preference training by DPO: the reference's log-probabilities are computed once, before the first step.
model {
  network = llama(layers = 2, width = 64, heads = 4, hidden = 128, vocab = 384, context = 128)
  loss    = dpo(beta = 0.2, chunks = auto)
}

data {
  source     = preferences("dpo/pairs.jsonl", tokenizer = "dpo/tokenizer")
  batch      = 8  # pairs
  validation = 10%
}

devices {
  cpus = 2
}

parallelism {
  zero = 2
}

train {
  steps       = 60
  optimizer   = adamw(lr = 1e-3)
  lr_schedule = warmup_cosine(warmup = 6 steps)
  clip        = 1.0
}

evaluate {
  every   = 30 steps
  metrics = [loss, reward_margin, reward_accuracy]
}
