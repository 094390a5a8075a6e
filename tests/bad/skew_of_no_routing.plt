import "base/gpt.plt"

model {
  network = llama(
    layers = 2, width = 32, heads = 4, context = 32, vocab = 256,
    experts = moe(experts = 8, top_k = 6, hidden = 32),
  )
}

parallelism {
  expert      = 2
  expert_skew = 1.5 #! E0454
}
