import "base/gpt.plt"

model {
  network = gpt(layers = 4, width = 64, heads = 5, context = 32) #! E0207
}
