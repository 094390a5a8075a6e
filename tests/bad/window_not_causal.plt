import "base/gpt.plt"

model {
  network = [embedding(width = 24), attention(heads = 4, window = 8), linear(256)]  #! E0224
}

data {
  source = stdlib(context = 16)
}
