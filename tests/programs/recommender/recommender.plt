# tables of categories and the products of their vectors, by Adagrad
model {
  network = python("recommender:DLRM")
  loss    = python("recommender:clicked")
}

data {
  source  = python("recommender:Clicks")
  batch   = 16
  shuffle = false
}

train {
  steps     = 12
  optimizer = adagrad(lr = 0.05)
}
