if large {
  model { network = gpt() }
}

data {
  batch = 64
}
