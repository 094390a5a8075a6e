import "base/digits.plt"

parallelism {
  data_shares = [2, 1] #! E0343 N0341
  gradients   = local_sgd() #! W0630
}
