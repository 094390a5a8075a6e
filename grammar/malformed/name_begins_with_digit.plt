data {
  2nd = 3
}
