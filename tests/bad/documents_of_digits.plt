import "base/digits.plt"

data {
  source    = digits() #! E0329
  documents = 3
}
