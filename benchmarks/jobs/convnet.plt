# What handwritten.py trains as `convnet`. Statistics of each rank alone, as DistributedDataParallel leaves them.
param sync = false

model {
  network = [
    conv2d(32, padding = 1), batch_norm(sync = sync), relu(), max_pool2d(2),
    conv2d(64, padding = 1), batch_norm(sync = sync), relu(), max_pool2d(2),
    conv2d(128, padding = 1), batch_norm(sync = sync), relu(), adaptive_avg_pool2d(1),
    flatten(), linear(10),
  ]
  loss = cross_entropy()
}

data {
  source = synthetic(samples = 4096, shape = [3, 32, 32], classes = 10)
  batch  = 64
}

devices {
  cpus = 2
}

train {
  steps     = 60
  optimizer = sgd(lr = 0.05, momentum = 0.9)
  seed      = 1
}

log {
  every       = 1_000 steps
  tensorboard = false
}
