model {
  network = python("cpu_tensors:Scaled") #! E0681
  loss    = python("cpu_tensors:weighted") #! E0681
}

data {
  source = synthetic(samples = 64, shape = [6], classes = 3)
  batch  = 8
}

devices {
  gpus = 1
}

train {
  steps     = 4
  optimizer = sgd(lr = 0.1)
}
