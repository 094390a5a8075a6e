# PyTorch's word language model: LSTM with a tied table, SGD with a clipped gradient
model {
  network = python("wordmodel:RNNModel")
  loss    = cross_entropy()
}

data {
  source  = python("wordmodel:Lines")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = sgd(lr = 2.0)
  clip      = 0.25
}
