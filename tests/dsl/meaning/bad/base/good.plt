# A small job that is right: the others import it and do one thing wrong.
param rate = 0.1

model {
  network = [linear(10)]
  loss    = cross_entropy()
}

data {
  source = digits()
  batch  = 64
}

train {
  epochs    = 1
  optimizer = sgd(lr = rate)
}
