model {
  network = python("scores:classes_first")
  loss    = cross_entropy(chunks = 2) #! E0682
}

data {
  source = python("scores:rows")
  batch  = 4
}

train {
  steps     = 2
  optimizer = sgd(lr = 0.1)
}
