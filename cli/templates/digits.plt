# Handwritten digits on two processes. `dslc check`, `dslc plan` and `dslc run` take this file as it is.
param rate = 0.05  # try: dslc run … --set rate=0.1

model {
  network = [
    conv2d(16, kernel = 5, padding = 2), batch_norm(), relu(), max_pool2d(2),
    conv2d(32, kernel = 5, padding = 2), batch_norm(), relu(), max_pool2d(2),
    flatten(), linear(10),
  ]
  loss = cross_entropy()
}

data {
  source     = digits()  # yours: arrays("file.npz"), text("file.txt"), python("module:function")
  batch      = 64  # of one optimizer step, whatever the number of processes
  validation = 20%
}

devices {
  cpus = 2  # or gpus = 2
}

train {
  epochs    = 5
  optimizer = sgd(lr = rate, momentum = 0.9)
}

evaluate {
  every   = 1 epoch
  metrics = [loss, accuracy]
}
