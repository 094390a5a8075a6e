import "base/digits.plt"

model {
  network = [conv2d(4), batch_norm(sync = false), flatten(), linear(10)] #! W0607
}

parallelism {
  microbatches = 2 #! W0606
}
