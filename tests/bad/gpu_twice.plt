import "base/digits.plt"

devices {
  gpus = [0, 1, 1] #! E0405
}
