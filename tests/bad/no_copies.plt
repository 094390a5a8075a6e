import "base/digits.plt"

devices {
  cpus = 2
}

parallelism {
  zero = 3
}

train {
  check_replicas = 100 steps #! W0103
}
