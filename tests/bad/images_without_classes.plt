import "base/digits.plt"

model {
  network = [flatten(), linear(2)]
}

data {
  source = images("base", size = 8) #! E0311
}
