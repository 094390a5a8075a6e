import "base/digits.plt"

parallelism {
  data_shares = [2, 1, 1] #! E0341
}
