import "base/digits.plt"

devices {
  gpus = 2
  kind = a100 #! E0407
}
