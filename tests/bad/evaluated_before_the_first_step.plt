model {
  network = mlp()
  loss    = cross_entropy()
}

data {
  source = digits()
  batch  = 64
}

parallelism {
  tensor_plan = []
}

train {
  steps     = 10
  optimizer = sgd(lr = 0.1)
}

evaluate {
  start = true  #! W0103
}
