import "../base/digits.plt"

train {
  optimizer = python("optimizers:Counting", lr = 0.1)
  no_decay  = ["*.bias"]
}

checkpoint {
  every = 1 epoch #! E0617
}
