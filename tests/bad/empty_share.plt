import "base/digits.plt"

data {
  batch      = 358
  last_batch = keep #! E0304
  validation = 0.2
}

devices {
  cpus = 2
}

train {
  epochs = 1
}
