import "../base/digits.plt"

model {
  network = python("structures:Looking") #! W0326
}

devices {
  cpus = 2
}

parallelism {
  gradients = local_sgd() #! E0632 W0630
}
