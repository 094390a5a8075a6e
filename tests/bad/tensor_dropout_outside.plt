import "base/gpt.plt"

model {
  network = [ #! W0608
    embedding(width = 64),
    positional_embedding(),
    linear(64),
    dropout(0.1), #! E0424
    linear(64),
    transformer_block(heads = 4),
    linear(256),
  ]
}

data {
  source = stdlib(context = 32)
}

parallelism {
  tensor   = 2
  sequence = true
}

train {
  dropout_generator = torch
}
