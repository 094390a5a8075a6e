data {
  if large: batch = 64
  workers = 2
}
