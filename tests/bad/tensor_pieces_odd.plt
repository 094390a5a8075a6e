import "base/gpt.plt"

model {
  network = gpt(layers = 4, width = 64, heads = 4, context = 33)
}

parallelism {
  tensor   = 2 #! E0419
  sequence = true
}
