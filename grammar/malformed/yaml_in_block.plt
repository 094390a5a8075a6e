data {
  source:
    name: digits
  batch = 64
}
