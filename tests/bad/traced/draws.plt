import "../base/digits.plt"

data {
  source = python("draws:Own") #! W0610
}
