import "base/digits.plt"

devices {
  nodes = 1..4
}

parallelism {
  data = 4 #! E0814
}

checkpoint {
  every = 100 steps
}
