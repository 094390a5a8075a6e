import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 4, top_k = 2, hidden = 44),  #! E0230
    linear(256),
  ]
}
