train {
  seed = 0x10
}
