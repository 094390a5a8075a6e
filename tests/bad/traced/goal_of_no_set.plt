model {
  network = [linear(3)]
  loss    = cross_entropy()
}

data {
  source = python("sets:sets")
  batch  = 8
}

train {
  steps     = 3
  optimizer = sgd(lr = 0.1)
}

evaluate {
  every = 1 step
}

checkpoint {
  every = 1 step
  best  = lowest(loss) #! E0317
}
