import "../base/digits.plt"

train {
  optimizer = python("optimizers:WholeMatrices", lr = 0.1)
}

devices {
  cpus = 2
}

parallelism {
  zero = 3 #! E0723
}
