# Cutting the texts of a step into words takes longer than training on them.
model {
  network = python("loading:TextNetwork")
  loss    = python("loading:word_losses")
}

data {
  source  = python("loading:Texts")
  collate = python("loading:padded")
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
