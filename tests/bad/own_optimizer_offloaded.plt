import "base/digits.plt"

train {
  optimizer = python("lion:Lion", lr = 1e-4)
}

devices {
  gpus = 1
}

memory {
  offload = [optimizer] #! E0616
}
