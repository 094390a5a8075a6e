import "base/digits.plt"

model {
  network = [flatten(), linear(9)] #! E0210
}
