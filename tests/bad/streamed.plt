import "base/digits.plt"

model {
  network = [flatten(), linear(10)]
}

data {
  source = datasets("ylecun/mnist", streaming = true) #! E0315
}
