import "base/digits.plt"

model {
  network = [flatten(), conv2d(8), linear(10)] #! E0201
}
