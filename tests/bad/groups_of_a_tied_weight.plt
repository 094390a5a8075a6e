import "base/gpt.plt"

model {
  network = gpt(layers = 1, width = 16, heads = 2, context = 16, vocab = 256, tie = true)
}

train {
  groups = [
    group("head.weight", lr = 1e-2),
    group(["embedding.*", "*.bias"], lr = 1e-4), #! W0660
  ]
}
