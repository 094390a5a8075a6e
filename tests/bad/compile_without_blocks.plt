import "base/digits.plt"

train {
  compile = blocks #! E0445
}
