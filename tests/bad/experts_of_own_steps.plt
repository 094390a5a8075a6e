import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 4, top_k = 2, hidden = 48, balance = bias(0.001)),
    linear(256),
  ]
}

parallelism {
  gradients = local_sgd(period = 4)  #! W0630 E0233
}
