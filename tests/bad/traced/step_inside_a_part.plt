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

parallelism {
  zero = 2 #! E0624
}

train {
  steps     = 2
  step      = python("duels:inside") #! W0620
  optimizer = sgd(lr = 0.1)
}
