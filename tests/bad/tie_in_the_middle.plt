import "base/gpt.plt"

model {
  network = [embedding(width = 24), linear(256, tie = true), linear(256)]  #! E0226
}

data {
  source = stdlib(context = 16)
}
