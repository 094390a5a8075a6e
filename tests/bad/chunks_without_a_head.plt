import "base/digits.plt"

model {
  network = [flatten(), linear(10), tanh()]
  loss    = cross_entropy(chunks = 4) #! E0682
}
