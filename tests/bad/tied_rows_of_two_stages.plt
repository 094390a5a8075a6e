model {
  network = gpt(layers = 4, width = 16, heads = 2, context = 8, vocab = 257, tie = true)
  loss    = cross_entropy()
}

data {
  source = synthetic(samples = 64, vocab = 257, context = 8)
  batch  = 16
}

devices {
  cpus = 4
}

parallelism {
  pipeline     = 2
  zero         = 1
  microbatches = 4
  schedule     = dualpipev #! E0446
}

train {
  steps     = 1
  optimizer = sgd(lr = 0.1)
}
