import "base/gpt.plt"

model {
  network = gpt(layers = 4, width = 66, heads = 6, context = 32) #! E0417
}

parallelism {
  tensor = 4
}
