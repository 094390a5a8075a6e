import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = images("none", size = 32, augment = [ #! W0309
    random_resized_crop(28), #! E0336
    random_horizontal_flip(),
  ])
  validation = 0.2
}
