train {
  optimizer = {name = adamw, lr = 3e-4}
  steps     = 5
}
