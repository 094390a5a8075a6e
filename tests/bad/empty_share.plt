import "base/digits.plt"

data {
  batch      = 1436
  last_batch = keep #! E0304
}

devices {
  cpus = 4
}

train {
  epochs = 1
}
