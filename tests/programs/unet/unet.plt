# a U-Net with batch norm for three classes, by SGD with momentum, as its paper has it
model {
  network = python("unet:UNet")
  loss    = python("unet:losses_of")
}

data {
  source  = python("unet:Scenes")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = sgd(lr = 0.05, momentum = 0.9, weight_decay = 1e-4)
  clip      = 1.0
}
