import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    moe(experts = 4, top_k = 2, hidden = 48, balance = loss(0.01)),
    linear(256),
  ]
}

parallelism {
  tensor = 2
}

train {
  compile = true  #! E0234 E0234
}
