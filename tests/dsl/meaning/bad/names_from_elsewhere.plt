import "base/good.plt"

train {
  max_epochs        = 3 #! E0107
  learning_rate     = 0.1 #! E0107
  gradient_clip_val = 1.0 #! E0107
  batch             = 32 #! E0107
  presicion         = bf16 #! E0107
}

devices {
  gpu         = 2 #! E0107
  num_workers = 4 #! E0107
}

optimizer { #! E0106
}

evalute { #! E0106
  every = 1 epoch #! W0103
}

wandb { #! E0106
}

parallelism {
  expert_tensor = 2 #! E0108
}
