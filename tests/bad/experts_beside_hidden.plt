import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    llama_block(heads = 4, hidden = 96, experts = moe(experts = 4, top_k = 2, hidden = 48)),  #! W0103
    linear(256),
  ]
}
