import "../base/digits.plt"

train {
  optimizer    = python("optimizers:lbfgs", lr = 0.1)
  precision    = fp16 #! W0609 E0663
  on_nonfinite = skip #! E0663
}

devices {
  cpus = 2
}

parallelism {
  zero = 1 #! E0663
}
