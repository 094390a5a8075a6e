// the data
data {
  // all of it, don't split
  batch = 64
}
