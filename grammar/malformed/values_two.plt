train {
  optimizer = adamw sgd
}
