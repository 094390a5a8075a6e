import "../base/digits.plt"

train {
  optimizer = python("optimizers:AllTogether", lr = 0.1)
}

devices {
  cpus = 2
}

parallelism {
  zero = 1 #! E0613
}
