model {
  network = gpt(layers = 600, width = 64, heads = 4, context = 32, vocab = 256) #! W0614
  loss    = cross_entropy()
}

data {
  source = synthetic(vocab = 256, context = 32)
  batch  = 16
}

train {
  steps     = 10
  optimizer = adamw(lr = 1e-3)
}

sweep {
  data.batch = [16, 17, 18, 19, 20, 21, 22, 23, 24, 25]
}
