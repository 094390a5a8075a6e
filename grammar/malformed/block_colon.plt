data: {
  batch = 64
}
