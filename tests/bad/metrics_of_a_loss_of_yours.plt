import "base/digits.plt"

model {
  network = [conv2d(10, kernel = 3)]
  loss    = python("mine:loss")
}

evaluate {
  metrics = [loss, accuracy, f1()] #! E0691
}
