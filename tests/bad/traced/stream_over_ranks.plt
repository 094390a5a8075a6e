model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source  = python("streams:plain") #! W0330
  batch   = 8
  workers = 2 #! W0330
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}

devices {
  cpus = 2
}
