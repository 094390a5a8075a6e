import "base/digits.plt"

devices {
  cpus = 2
}

parallelism {
  zero     = 3
  replicas = 3 #! E0403
}
