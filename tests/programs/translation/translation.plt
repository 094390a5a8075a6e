# an encoder-decoder that returns the sum of its losses and their number
model {
  network = python("translation:Translator")
  loss    = own()
}

data {
  source  = python("translation:Pairs")
  collate = python("translation:padded")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adamw(lr = 1e-3)
}
