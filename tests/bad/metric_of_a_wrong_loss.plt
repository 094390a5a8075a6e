import "base/digits.plt"

model {
  network = [flatten(), linear(10)] #! E0216
  loss    = mse()
}

evaluate {
  metrics = [loss, accuracy, top_k(3)]
}
