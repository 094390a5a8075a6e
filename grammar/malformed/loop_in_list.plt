model {
  network = [linear(n) for n in sizes]
}
