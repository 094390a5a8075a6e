import "base/digits.plt"

data {
  batch = 62
}

devices {
  nodes = 2..4 #! E0813
}

checkpoint {
  every = 100 steps
}
