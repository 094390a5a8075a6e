import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  shuffle_buffer = 500 #! W0103
  interleave     = 4   #! W0103
}
