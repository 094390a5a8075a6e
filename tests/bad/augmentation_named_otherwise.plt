import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source     = images("none", size = 8, train_transforms = [random_crop(8)], normalise = imagenet) #! E0131
  validation = 0.2
}
