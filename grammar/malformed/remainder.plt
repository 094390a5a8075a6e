train {
  steps = 7 % 2
  seed  = large % 2
}
