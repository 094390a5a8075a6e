# a U-Net with the Dice loss
model {
  network = python("segmentation:UNet")
  loss    = python("segmentation:dice")
}

data {
  source  = python("segmentation:pictures")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 1e-2)
}
