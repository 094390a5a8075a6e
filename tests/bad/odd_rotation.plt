import "base/gpt.plt"

model {
  network = llama(layers = 2, width = 12, heads = 4, hidden = 48, context = 16)  #! E0223
}

data {
  source = stdlib(context = 16)
}
