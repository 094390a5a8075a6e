import "base/digits.plt"

devices {
  cpus = 2
}
parallelism {
  zero      = 2
  gradients = bf16() #! E0605
}
train {
  optimizer = onebit_adam(betas = [0.9, 0.99], freeze = 50)
}
