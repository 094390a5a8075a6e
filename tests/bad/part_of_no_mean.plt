import "base/own.plt"

model {
  loss = own(ignore = 0, shift = 1) #! W0103
}

data {
  source = python("mine:samples")
}
