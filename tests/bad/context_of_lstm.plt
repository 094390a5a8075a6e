import "base/gpt.plt"

model {
  network = [
    embedding(width = 64),
    lstm(64), #! E0425
    linear(256),
  ]
}

data {
  source = stdlib(context = 32)
}

parallelism {
  context = 2
}
