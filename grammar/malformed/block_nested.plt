train {
  steps = 5
  optimizer {
    lr = 3e-4
  }
  clip = 1.0
}
