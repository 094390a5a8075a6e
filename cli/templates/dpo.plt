# A small Llama that learns which of two answers is preferred, by DPO, on two processes.
model {
  network = llama(layers = 2, width = 64, heads = 4, hidden = 128, vocab = 384, context = 128)
  loss    = dpo(beta = 0.1)  # the reference: the weights at the start
}

data {
  source     = preferences("dpo/pairs.jsonl", tokenizer = "dpo/tokenizer")
  batch      = 8  # pairs
  validation = 10%
}

devices {
  cpus = 2
}

train {
  steps       = 100
  optimizer   = adamw(lr = 1e-3)
  lr_schedule = warmup_cosine(warmup = 10 steps)
  clip        = 1.0
}

evaluate {
  every   = 50 steps
  metrics = [loss, reward_margin, reward_accuracy]
}
