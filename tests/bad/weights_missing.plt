import "base/digits.plt"

model {
  weights = "no_such_run" #! W0712
}
