import "base/digits.plt"

devices {
  nodes = 1..2 #! E0816
}
