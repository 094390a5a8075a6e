# one tower for both images of a pair, by PyTorch's example
model {
  network = python("siamese:Siamese")
  loss    = python("siamese:same")
}

data {
  source  = python("siamese:Pairs")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = python("torch.optim:Adadelta", lr = 1.0)
}
