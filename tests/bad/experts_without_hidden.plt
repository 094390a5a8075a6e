import "base/gpt.plt"

data {
  source = stdlib(context = 16)
}

model {
  network = [
    embedding(width = 32),
    llama_block(heads = 4),  #! E0228
    linear(256),
  ]
}
