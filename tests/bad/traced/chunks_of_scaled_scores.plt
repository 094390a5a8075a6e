model {
  network = python("scores:scaled")
  loss    = cross_entropy(chunks = 2) #! E0682
}

data {
  source = python("scores:samples")
  batch  = 4
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
