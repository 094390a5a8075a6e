import "base/gpt.plt"

data {
  validation = 5%
}

evaluate {
  every = 50 steps #! W0603
}
