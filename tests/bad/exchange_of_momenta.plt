import "base/digits.plt"

devices {
  cpus = 2
}
parallelism {
  zero = 2
}
train {
  optimizer = qadam(lr = 0.01, eps = 1e-4, warmup = 50) #! E0630 W0630
}
