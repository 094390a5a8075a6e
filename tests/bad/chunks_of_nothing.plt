import "base/digits.plt"

model {
  loss = cross_entropy(chunks = 64) #! E0682
}
