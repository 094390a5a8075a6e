import "base/digits.plt"

data {
  sampler = by_length("no.npy") #! E0318 W0327
}
