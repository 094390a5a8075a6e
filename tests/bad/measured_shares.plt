import "base/digits.plt"

parallelism {
  data_shares = measured #! E0343
  zero        = 3
}
