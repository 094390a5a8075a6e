import "base/digits.plt"

data {
  source  = mixture([
    digits(),
    synthetic(samples = 500, shape = [1, 8, 8], classes = 4), #! E0327
  ], weights = [10000, 0.001])
  sampler = balanced() #! E0328
}
