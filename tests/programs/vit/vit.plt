# a vision transformer with smoothed labels, decay of matrices alone and a cosine
model {
  network = python("vit:ViT")
  loss    = cross_entropy(label_smoothing = 0.1)
}

data {
  source  = python("vit:Gratings")
  batch   = 8
  shuffle = false
}

train {
  steps       = 12
  optimizer   = adamw(lr = 1e-3, weight_decay = 0.1)
  lr_schedule = warmup_cosine(warmup = 0 steps)
  no_decay    = ["*.bias", "*norm*", "cls_token", "pos_embed"]
}
