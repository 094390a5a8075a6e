# sub-pixel convolution, by torch's mean squared error
model {
  network = python("superresolution:ESPCN")
  loss    = mse()
}

data {
  source  = python("superresolution:Pairs")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 1e-2)
}
