data {
  bаtch = 64
}
