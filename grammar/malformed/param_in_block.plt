data {
  param batch = 64
  workers = 2
}
