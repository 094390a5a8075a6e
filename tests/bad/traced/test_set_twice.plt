model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = python("sets:triple")
  batch  = 8
  test   = 10% #! E0306
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}
