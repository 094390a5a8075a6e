train {
  steps = clip = 3
}
