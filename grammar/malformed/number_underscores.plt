data {
  batch = 1__000
}
