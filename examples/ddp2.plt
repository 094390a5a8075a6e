# Two nodes, as `ddp2` had it: each node compares the samples of the batch that it has, and gradients are summed over all
# nodes. The same command on each: `dslc run ddp2.plt --rendezvous HOST`. With `over = all` the training would not depend on
# the nodes.
model {
  network = [
    conv2d(16, kernel = 3, padding = 1), relu(), max_pool2d(2),
    flatten(), linear(64), relu(), linear(16),
  ]
  loss = contrastive(over = node, temperature = 0.2)
}

data {
  source     = digits()
  batch      = 128
  validation = 20%
}

devices {
  nodes = 2
  cpus  = 2
}

train {
  epochs    = 5
  optimizer = adamw(lr = 3e-3)
}

evaluate {
  every = 1 epoch
}
