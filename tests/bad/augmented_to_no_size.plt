import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = images("none", size = 32, resize = 30, augment = [ #! W0309 E0335
    resize(32), #! E0336
  ])
  validation = 0.2
}
