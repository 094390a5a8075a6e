import "base/digits.plt"

model {
  network = [conv2d(1, 32, 3, 1), relu(), flatten(), linear(10)] #! E0202
}
