import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 2, top_k = 4, hidden = 64),  #! E0229
    linear(256),
  ]
}
