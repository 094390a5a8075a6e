model {
  network = [
    conv2d(16), relu(),
    flatten(), linear(10),

  loss = cross_entropy()
}
