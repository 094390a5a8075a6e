import "base/digits.plt"

train {
  optimizer = qadam()
}

parallelism {
  gradients = bytegrad() #! E0605
}
