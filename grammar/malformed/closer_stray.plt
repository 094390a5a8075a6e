data {
  batch = 64)
}
