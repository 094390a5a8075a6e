# Micro-batches: the same digits, each rank working through its share of a batch in four pieces. The training is the same
# as without them, only slower and smaller in memory; layer norm, because batch statistics would depend on the pieces.
# The records go to TensorBoard, with the job and the diagram of its plan, and to a table.
model {
  network = [
    conv2d(16, padding = 1), relu(), max_pool2d(2),
    flatten(), layer_norm(), linear(64), relu(), linear(10),
  ]
  loss = cross_entropy()
}

data {
  source     = digits()
  batch      = 128
  validation = 20%
  last_batch = keep
}

devices {
  cpus = 2
}

parallelism {
  microbatches = 4
}

train {
  epochs    = 5
  optimizer = adamw(lr = 3e-3)
  clip      = 1.0
}

evaluate {
  every   = 1 epoch
  metrics = [loss, accuracy, top_k(3)]
}

log {
  loggers = [tensorboard(), csv()]
}
