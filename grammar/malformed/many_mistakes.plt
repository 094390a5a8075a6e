import base

model {
  network = gpt(layers: 4)
  loss    = cross_entropy(
}

data {
  batch = 1__0
  source = text('a')
  workers 4
}

train {
  steps = True
}
