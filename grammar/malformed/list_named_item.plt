train {
  no_decay = [bias = true]
}
