import "base/digits.plt"

devices {
  cpus = 2
}

parallelism {
  gradients = diloco(period = 10000) #! W0603 W0630
}
