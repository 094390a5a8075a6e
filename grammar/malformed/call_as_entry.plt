model {
  gpt(layers = 4)
}
