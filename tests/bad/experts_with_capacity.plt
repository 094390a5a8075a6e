import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 4, top_k = 2, hidden = 48, capacity = 1.25),  #! E0231 W0238
    linear(256),
  ]
}

parallelism {
  microbatches = 2
}
