import "base/gpt.plt"

model {
  network = llama(
    layers = 2, width = 32, heads = 4, context = 32, vocab = 256,
    experts = moe(experts = 4, top_k = 2, hidden = 16),
  )
}

train {
  optimizer = adamw(state = 8bit)
}

parallelism {
  expert = 2 #! E0737
}
