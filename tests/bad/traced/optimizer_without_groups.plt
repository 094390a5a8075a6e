import "../base/digits.plt"

train {
  optimizer = python("optimizers:lbfgs", lr = 0.1)
  no_decay  = ["*.bias"] #! E0690
}
