import "base/digits.plt"

data {
  batch = 50 #! E0301
}

devices {
  cpus = 4
}

parallelism {
  microbatches = 3
}
