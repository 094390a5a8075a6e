model {
  network = mlp()
  loss    = cross_entropy()
}

data {
  source = digits()
  batch  = 64
}

train {
  steps     = 10
  optimizer = sgd(lr = 0.1)
}

launch {
  with = slurm(partition = "gpu\ntouch /tmp/stranger", options = ["--exclusive"])  #! E0835
}
