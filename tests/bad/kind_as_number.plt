model {
  network = gpt(layers = 4, width = 128, heads = 4, context = 64, vocab = 256)
  loss = cross_entropy()
}
data { source = stdlib(), batch = 16 }
devices { gpus = h100 } #! E0120
parallelism {
  pipeline = 2
  schedule = interleaved(4) #! E0121
}
train { steps = 10, optimizer = adamw(lr = 0.001) }
