# graph convolution over graphs of unequal size, as a dataclass of tensors
model {
  network = python("graphs:Convolution")
  loss    = python("graphs:losses_of")
}

data {
  source  = python("graphs:Molecules")
  collate = python("graphs:joined")
  batch   = 8
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 3e-3)
}
