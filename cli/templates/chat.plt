# A small Llama that answers questions, fine-tuned on conversations, on two processes: the loss counts the answers alone.
model {
  network = llama(layers = 2, width = 64, heads = 4, hidden = 128, vocab = 384, context = 128)
  loss    = cross_entropy()
}

data {
  source     = chat("chat/conversations.jsonl", tokenizer = "chat/tokenizer", pack = documents)
  batch      = 8  # sequences
  validation = 10%
}

devices {
  cpus = 2
}

train {
  steps       = 100
  optimizer   = adamw(lr = 3e-3)
  lr_schedule = warmup_cosine(warmup = 10 steps)
  clip        = 1.0
}

evaluate {
  every   = 50 steps
  metrics = [loss, accuracy]
}
