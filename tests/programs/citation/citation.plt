# graph convolution over one graph, whose adjacency is sparse
model {
  network = python("citation:GCN")
  loss    = cross_entropy()
}

data {
  source  = python("citation:Papers")
  batch   = 12
  shuffle = false
}

train {
  steps     = 12
  optimizer = adam(lr = 1e-2, weight_decay = 5e-4)
}
