model {
  network = python("large:Wide")
  loss    = python("large:divergence") #! W0650
}

data {
  source = python("large:data")
  batch  = 4
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
