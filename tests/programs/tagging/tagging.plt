# token classification with sentences of unequal length, masks and class weights
model {
  network = python("tagging:Tagger")
  loss    = python("tagging:weighted")
}

data {
  source  = python("tagging:Sentences")
  collate = python("tagging:padded")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-3)
}
