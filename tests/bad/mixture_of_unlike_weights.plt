import "base/digits.plt"

data {
  source = mixture([digits(), digits()], weights = [1]) #! E0327
}
