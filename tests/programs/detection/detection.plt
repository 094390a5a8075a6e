# detection with a dict of boxes for each picture
model {
  network = python("detection:Detector")
  loss    = python("detection:matched")
}

data {
  source  = python("detection:Scenes")
  collate = python("detection:listed")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-3)
}
