model {
  network = gpt(layers = 2, width = 16, heads = 2, context = 8, vocab = 64)
  loss    = cross_entropy()
}
data { source = synthetic(samples = 200, vocab = 64, context = 8), batch = 12 }
devices { cpus = 4 }
parallelism {
  pipeline    = 2
  microbatches = 2
  data_shares = measured #! E0343
}
train { steps = 4, optimizer = sgd(lr = 0.1) }
