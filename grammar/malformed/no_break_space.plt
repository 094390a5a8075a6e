data {
  batch = 64
}
