import "base/digits.plt"

devices {
  cpus = 3
}

data {
  batch = 63
}

parallelism {
  gradients = decentralized(peers = shift_one) #! E0633 W0630
}
