import "base/digits.plt"

expect {
  mfu > 40% #! W0503
}
