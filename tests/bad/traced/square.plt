model {
  network = python("square:network") #! W0651
  loss    = cross_entropy()
}

data {
  source = python("square:data")
  batch  = 4
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
