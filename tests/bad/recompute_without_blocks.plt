import "base/digits.plt"

memory {
  recompute = full #! W0714
}
