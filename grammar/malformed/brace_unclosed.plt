model {
  network = gpt()
  loss    = cross_entropy()

data {
  batch = 64
}
