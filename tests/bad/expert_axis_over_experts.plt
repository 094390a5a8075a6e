import "base/gpt.plt"

data {
  source = stdlib(context = 32)
}

model {
  network = [embedding(256, 32), moe(experts = 6, top_k = 2, hidden = 32), linear(256)]
}

parallelism {
  expert = 4 #! E0452
}
