# Composition: `repeat` writes layers several times over, `residual` adds what goes in to what comes out.
param blocks = 3
param width  = 32

model {
  network = [
    conv2d(width, padding = 1), batch_norm(), relu(),
    repeat(blocks, [
      residual([conv2d(width, padding = 1), batch_norm(), relu(), conv2d(width, padding = 1), batch_norm()]),
      relu(),
    ]),
    adaptive_avg_pool2d(1), flatten(), linear(10),
  ]
  loss = cross_entropy()
}

data {
  source     = digits()
  batch      = 64
  validation = 20%
}

devices {
  cpus = 2
}

train {
  epochs    = 3
  optimizer = sgd(lr = 0.05, momentum = 0.9)
}

evaluate {
  metrics = [loss, accuracy]
}
