train {
  optimizer = adamw(betas = [0.9, 0.95)
  steps     = 5
}
