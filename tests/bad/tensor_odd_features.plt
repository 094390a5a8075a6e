import "base/gpt.plt"

model {
  network = [
    embedding(width = 64),
    linear(63), #! E0417
    relu(),
    linear(64),
    transformer_block(heads = 4),
    linear(256),
  ]
}

data {
  source = stdlib(context = 32)
}

parallelism {
  tensor = 2
}
