model {
  network = gpt(layers = 4]
}
