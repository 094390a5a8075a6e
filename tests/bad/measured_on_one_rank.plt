import "base/digits.plt"

devices {
  cpus = 1
}

parallelism {
  data_shares = measured #! W0103
}
