import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 4, top_k = 2, hidden = 48, balance = loss(0.01)),  #! E0232
    linear(256),
  ]
}

devices {
  cpus = 2
}

parallelism {
  pipeline = 2
}
