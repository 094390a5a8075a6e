model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = python("streams:once") #! E0802
  batch  = 8
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
