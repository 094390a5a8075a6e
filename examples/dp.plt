# One node, as DataParallel had it: its processes each work on a part of the batch, and the loss compares all samples of
# it. Embeddings of handwritten digits, by their classes; the same training as in one process.
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
  cpus = 2
}

train {
  epochs    = 5
  optimizer = adamw(lr = 3e-3)
}

evaluate {
  every = 1 epoch
}
