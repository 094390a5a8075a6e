# Decoding the images of a step takes longer than training on them.
model {
  network = python("loading:image_network")
  loss    = cross_entropy()
}

data {
  source  = python("loading:Images")
  batch   = 32
  shuffle = false
  workers = 2
}

devices {
  threads = 1
}

train {
  steps     = 120
  optimizer = sgd(lr = 0.01)
}

log {
  every       = 20 steps
  tensorboard = false
}
