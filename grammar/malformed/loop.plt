for n in 1..4 {
  devices { nodes = n }
}
