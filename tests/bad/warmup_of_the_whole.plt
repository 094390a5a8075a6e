import "base/digits.plt"

devices {
  cpus = 2
}

train {
  optimizer = onebit_adam(freeze = 110) #! W0630 W0635
}
