import "base/digits.plt"

devices {
  cpus = 4
}

parallelism {
  zero      = 3
  replicas  = 2
  gradients = fp16() #! E0634 W0630
}
