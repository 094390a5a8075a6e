import "base/digits.plt"

train {
  on_spike = rewind(steps = 20) #! E0665
}

checkpoint {
  every = 30 steps
}
