import "base/digits.plt"

devices {
  cpus = 2
}

parallelism {
  zero      = 2
  gradients = local_sgd() #! E0630 W0630
}
