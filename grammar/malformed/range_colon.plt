devices {
  nodes = 1:4
}
