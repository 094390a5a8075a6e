import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = images(
    "none",
    size = 8,
    resize = 9,
    augment = [random_crop(8)],
    transform = python("mine:transform"), #! E0105
  )
  validation = 0.2
}
