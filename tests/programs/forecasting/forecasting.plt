# time series of unequal length through a packed GRU
model {
  network = python("forecasting:Forecaster")
  loss    = python("forecasting:squared")
}

data {
  source  = python("forecasting:Series")
  collate = python("forecasting:padded")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 1e-2)
}
