# On a cluster with SLURM: queued as four jobs, one for each learning rate. A job that reaches its time limit writes a
# checkpoint, goes back into the queue and goes on; one that fails is started again, at most twice.
#   dslc submit examples/slurm.plt --dry-run
#   dslc submit examples/slurm.plt --set 'launch.with=slurm(partition = "gpu", time = 2h)'
#   dslc status runs/slurm
language = 1

model {
  network = mlp(widths = [256, 128], classes = 10)
  loss    = cross_entropy()
}

data {
  source     = digits()
  batch      = 64
  validation = 20%
}

devices {
  nodes = 2
  cpus  = 2
}

train {
  epochs    = 20
  optimizer = sgd(lr = 0.1, momentum = 0.9)
}

evaluate {
  every   = 1 epoch
  metrics = [loss, accuracy]
}

checkpoint {
  every = 5 epochs
}

launch {
  with     = slurm(time = 1h)
  restarts = 2
}

sweep {
  train.optimizer.lr = [0.01, 0.03, 0.1, 0.3]
}
