# A small vision transformer on the digits, its learning rate scaled with the batch.
model {
  network = vit(patch = 2, layers = 3, width = 48, heads = 4)
  loss    = cross_entropy()
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
  epochs      = 10
  optimizer   = adamw(lr = 1e-3)
  scale_lr    = linear(base_batch = 64)
  lr_schedule = warmup_linear(warmup = 1 epoch)
  clip        = 1.0
}

evaluate {
  every   = 2 epochs
  metrics = [loss, accuracy]
}
