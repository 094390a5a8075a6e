import "base/digits.plt"

model {
  network = [flatten(), batch_norm(), linear(10)]
}

data {
  batch = 2
}

devices {
  cpus = 1
}

parallelism {
  microbatches = 2 #! W0606 E0314
}
