import "base/digits.plt"

train {
  optimizer = sgd(nesterov = true) #! E0138
}
