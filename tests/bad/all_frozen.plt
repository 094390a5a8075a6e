import "base/digits.plt"

model {
  freeze = ["1.*"] #! E0711
}
