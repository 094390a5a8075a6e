data {
  batch = 64
