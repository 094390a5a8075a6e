import "base/digits.plt"

model {
  network = gpt(layers = 1, width = 8, heads = 2, context = 8, vocab = 16)
}

data {
  source = tokens("corpus-*.bin") #! W0309
}
