train {
  compile = large > 3
}
