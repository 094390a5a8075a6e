# a mixture of experts that routes by `nonzero`; of four points some experts get none
model {
  network = python("experts:Experts")
  loss    = cross_entropy()
}

data {
  source  = python("experts:points")
  batch   = 4
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-2)
}
