import "base/digits.plt"

model {
  weights = "no_such_run" #! E0712
}
