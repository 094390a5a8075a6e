import "base/digits.plt"

model {
  network = [flatten(), batch_norm(sync = false), linear(10)] #! W0607
}

parallelism {
  data_shares = measured #! E0314
}
