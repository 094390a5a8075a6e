import "base/digits.plt"

devices {
  cpus = 1
}

parallelism {
  data        = 1
  data_shares = [1] #! W0103
}
