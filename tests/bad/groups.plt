import "base/digits.plt"

train {
  optimizer = sgd(lr = 0.1)
  groups    = [group("1.wieght", lr = 1e-2), group("1.bias")] #! W0710 W0103
}
