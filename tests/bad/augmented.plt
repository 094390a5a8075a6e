import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = mnist("none", normalize = imagenet, augment = [ #! W0309 E0335
    random_crop(28, padding = 4),
    color_jitter(brightness = [1.2, 0.8]), #! E0335
    random_erasing(), #! E0335
    gaussian_blur(4), #! E0335
    rand_augment(magnitude = 40), #! E0335
    auto_augment(cifar10), #! E0335
    random_rotation(10, fill = [0, 0, 0]), #! E0335
  ])
  validation = 0
}
