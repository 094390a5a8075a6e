train {
  clip = .5
}
