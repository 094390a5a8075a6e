import "base/gpt.plt"

model {
  network = llama(layers = 2, width = 32, heads = 4, kv_heads = 3, hidden = 48, context = 16)  #! E0222
}

data {
  source = stdlib(context = 16)
}
