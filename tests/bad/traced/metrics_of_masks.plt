import "../base/digits.plt"

model {
  network = [conv2d(3, kernel = 3, padding = 1)]
  loss    = python("losses:of_masks")
}

data {
  source     = python("losses:Masks")
  batch      = 8
  validation = 20%
}

evaluate {
  metrics = [loss, accuracy, iou()] #! E0691
}
