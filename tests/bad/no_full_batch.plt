import "base/digits.plt"

data {
  batch = 2000 #! E0303
}
