model {
  network = python("duels:Duel")
  loss    = own()
  freeze  = ["heads.*"] #! E0710
}

data {
  source = python("duels:Pairs")
  batch  = 4
}

train {
  steps     = 2
  step      = python("duels:draws") #! W0620
  optimizer = sgd(lr = 0.1)
  groups    = [group("body.*", lr = 0.2)] #! E0710
}
