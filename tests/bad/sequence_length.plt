import "base/digits.plt"

model {
  network = [embedding(width = 8), linear(256)]
}

data {
  source = stdlib() #! E0310
}
