import "base/digits.plt"

data {
  batch = 64 #! E0301
}

devices {
  cpus = 3
}

parallelism {
  data = 3
}
