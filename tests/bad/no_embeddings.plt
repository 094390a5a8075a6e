import "base/digits.plt"

model {
  network = [conv2d(8, padding = 1)] #! E0227
  loss    = contrastive()
}
