data {
  batch =
  workers = , source = digits()
}
