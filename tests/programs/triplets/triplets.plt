# a siamese network that returns its triplet loss
model {
  network = python("triplets:Siamese")
  loss    = own()
}

data {
  source  = python("triplets:Triplets")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = sgd(lr = 0.05, momentum = 0.9)
}
