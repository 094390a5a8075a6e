import "base/gpt.plt"

model {
  network = [embedding(width = 24), linear(20), linear(256, tie = true)]  #! E0226
}

data {
  source = stdlib(context = 16)
}
