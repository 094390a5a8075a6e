data {
  batch = param
}
