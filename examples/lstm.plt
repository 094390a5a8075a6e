# A layer list over text: which byte follows the last 64?
model {
  network = [
    embedding(width = 32), lstm(96), layer_norm(), linear(256),
  ]
  loss = cross_entropy()
}

data {
  source     = stdlib(context = 64)
  batch      = 32
  validation = 1%
}

devices {
  cpus = 2
}

train {
  steps     = 200
  optimizer = adam(lr = 3e-3)
  clip      = 1.0
}

evaluate {
  metrics = [loss, perplexity, accuracy]
}
