import "base/digits.plt"

data {
  source = mixture([
    digits(),
    synthetic(shape = [1, 8, 9], classes = 10), #! E0327
    mixture([digits(), digits()]), #! E0327
  ], weights = [1, 2]) #! E0327
}
