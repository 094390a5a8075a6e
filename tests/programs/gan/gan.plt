# a DCGAN, whose step makes two updates
model {
  network = python("gan:Gan")
  loss    = own()
}

data {
  source  = python("gan:Pictures")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  step      = python("gan:step")
  optimizer = adam(lr = 2e-3, betas = [0.5, 0.999])
}
