import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source     = digits()
  validation = 60% #! E0305
  test       = 40%
}
