import "base/digits.plt"

devices {
  cpus = 1
}

parallelism {
  zero = 2 #! W0402
}
