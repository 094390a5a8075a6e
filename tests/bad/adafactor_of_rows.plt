import "base/digits.plt"

train {
  optimizer = adafactor(lr = 0.01)
}

devices {
  cpus = 2
}

parallelism {
  zero = 3 #! E0723
}
