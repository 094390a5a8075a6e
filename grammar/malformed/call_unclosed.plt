model {
  network = gpt(layers = 4, width = 128
  loss    = cross_entropy()
}

data {
  batch = 64
}
