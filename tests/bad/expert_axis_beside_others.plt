import "base/gpt.plt"

model {
  network = llama(
    layers = 2, width = 32, heads = 4, context = 32, vocab = 256,
    experts = moe(experts = 6, top_k = 2, hidden = 32),
  )
}

parallelism {
  expert    = 2 #! E0453
  gradients = bf16() #! W0630
}
