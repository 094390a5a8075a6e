train {
  clip = 1.2.3
}
