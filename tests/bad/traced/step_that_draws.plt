model {
  network = python("duels:Duel")
  loss    = own()
}

data {
  source = python("duels:Pairs")
  batch  = 4
}

devices {
  cpus = 2
}

train {
  steps     = 2
  step      = python("duels:draws") #! W0620 W0624
  optimizer = sgd(lr = 0.1)
}
