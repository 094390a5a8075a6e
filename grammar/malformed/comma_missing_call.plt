train {
  optimizer = adamw(lr = 3e-4 weight_decay = 0.1)
}
