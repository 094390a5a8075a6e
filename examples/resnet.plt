# A library network on made-up images, in bf16, with a warm-up, a promise about its size, and one process for each core.
model {
  network = resnet(depth = 18, width = 16, stem = small)
  loss    = cross_entropy(label_smoothing = 0.1)
}

data {
  source     = synthetic(samples = 512, shape = [3, 32, 32], classes = 10)
  batch      = 64
  validation = 64 / 512
}

devices {
  cpus = 2
}

train {
  epochs      = 2
  optimizer   = sgd(lr = 0.1, momentum = 0.9, nesterov = true, weight_decay = 5e-4)
  lr_schedule = warmup_cosine(warmup = 10%)
  precision   = bf16
}

evaluate {
  metrics = [loss, accuracy]
}

expect {
  devices == 2
  parameters < 1_000_000
}
