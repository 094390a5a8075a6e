import "base/digits.plt"

devices {
  cpus = 2
}

train {
  optimizer = qadam(warmup = 5) #! W0630 W0635
}
