import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = images(
    "none",
    size = 8,
    augment = [
      RandomResizedCrop(8), #! E0130
      horizontal_flip(), #! E0130
      TrivialAugment(), #! E0130
      mixup(0.2), #! E0130
      ToTensor(), #! E0130
      random_crop(8, paddin = 4), #! E0131
      random_rotation(-10), #! E0125
      random_horizontal_flip(p = 2), #! E0125
      flatten(), #! E0130
    ],
    normalize = imagnet, #! E0120
  )
  validation = 0.2
}
