import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 36),
    moe(experts = 4, top_k = 2, hidden = 48),  #! E0230
    linear(256),
  ]
}
