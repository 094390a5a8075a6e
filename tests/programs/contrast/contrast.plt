# SimCLR, whose loss compares the samples of the whole batch
model {
  network = python("contrast:SimCLR")
  loss    = python("contrast:nt_xent", over = all)
}

data {
  source  = python("contrast:Views")
  batch   = 16
  shuffle = false
}

train {
  steps     = 12
  optimizer = sgd(lr = 0.5, momentum = 0.9)
}
