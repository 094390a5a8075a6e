import "base/digits.plt"

data {
  source     = synthetic(samples = 70, shape = [4], classes = 10)
  validation = 0.1% #! E0305
}
