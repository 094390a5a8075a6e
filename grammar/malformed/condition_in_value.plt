data {
  batch = 64 if large else 32
  workers = large ? 2 : 4
}
