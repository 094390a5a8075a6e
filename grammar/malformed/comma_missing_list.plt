model {
  network = [
    conv2d(16),
    relu()
    flatten(), linear(10)
  ]
}
