train {
  clip = 1e999
}
