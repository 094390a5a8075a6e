data {
  shuffle
  batch = 64
}
