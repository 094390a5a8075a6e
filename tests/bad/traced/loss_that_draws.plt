model {
  network = python("duels:Scores")
  loss    = python("duels:of_noisy") #! W0608
}

data {
  source = python("duels:Rows")
  batch  = 4
}

devices {
  cpus = 2
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
