import "base/digits.plt"

devices {
  gpus = 2
  kind = h10 #! E0407
}
