model {
  network = [
    linaer(10), #! E0130
    conv2d(), #! E0109
    conv2d(16, channels = 8), #! E0133
    max_pool2d(2, 2, 0, 1), #! E0134
    adamw(), #! E0130
  ]
  loss = adam() #! E0130
}

data {
  source = synthetic(shape = [4], vocab = 10) #! E0105
  batch  = 8
}

train {
  steps       = 10
  optimizer   = adamw(learning_rate = 1e-3, betas = [0.9]) #! E0131 E0136
  lr_schedule = warmup_cosine(warmup = 0.1) #! E0124
  scale_lr    = linear #! E0109
}

launch {
  with = slurm(partition = gpu) #! E0120
}

memory {
  recompute = budget(0) #! E0125
}
