# REINFORCE with a baseline, whose step plays the episodes
model {
  network = python("reinforce:ActorCritic")
  loss    = own()
}

data {
  source  = python("reinforce:Starts")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  step      = python("reinforce:step")
  optimizer = adam(lr = 3e-3)
}
