import "base/digits.plt"

train {
  optimizer = qadam() #! E0605
}

parallelism {
  gradients = bytegrad() #! E0605
}
