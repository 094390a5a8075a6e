import "base/digits.plt"

train {
  on_spike = rewind(skip = 3 batches) #! E0665
}

checkpoint {
  every = 10 min
}
