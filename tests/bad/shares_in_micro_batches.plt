import "base/digits.plt"

data {
  batch = 63 #! E0342
}

parallelism {
  data_shares  = [2, 1]
  microbatches = 2
}
