train {
  clip = 5.
}
