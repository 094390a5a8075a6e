import "base/gpt.plt"

model {
  network = [
    embedding(width = 64),
    lstm(64),
    transformer_block(heads = 4),
    linear(256),
  ]
}

data {
  source = stdlib(context = 32)
}

parallelism {
  tensor = 2 #! E0416
}
