data = {
  batch = 64
}
