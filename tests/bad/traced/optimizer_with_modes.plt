import "../base/digits.plt"

parallelism {
  zero = 1 #! E0662
}

train {
  optimizer = python("optimizers:Modes", lr = 0.1)
  ema       = 0.99 #! E0662
}
