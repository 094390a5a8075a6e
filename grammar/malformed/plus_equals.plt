train {
  steps += 100
  clip => 2
}
