import "base/digits.plt"

devices {
  gpus = 0 #! E0406
}
