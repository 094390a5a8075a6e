data {
  batch = 64[31m
}
