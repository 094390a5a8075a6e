model {
  network = [embedding(width = 8), residual([lstm(8)]), linear(256)]
  loss    = cross_entropy()
}

data {
  source = stdlib(context = 16)
  batch  = 8
}

train {
  steps     = 10
  optimizer = sgd(lr = 0.1)
  precision = bf16 #! E0718
}
