import "base/digits.plt"

data {
  batch = 1 #! E0301
}
