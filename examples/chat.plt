# Fine-tuning on conversations: several in a sequence and kept apart, with the loss on the assistant's tokens alone.
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

parallelism {
  zero = 2
}

train {
  steps       = 60
  optimizer   = adamw(lr = 3e-3)
  lr_schedule = warmup_cosine(warmup = 6 steps)
  clip        = 1.0
}

evaluate {
  every   = 30 steps
  metrics = [loss, accuracy]
}

generate {
  every      = 30 steps
  prompts    = ["What is three plus four?"]
  max_tokens = 24
}
