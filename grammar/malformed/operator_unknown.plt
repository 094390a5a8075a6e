train {
  clip  = 2 ^ 3
  steps = 7 % 2
  seed  = !true
}
