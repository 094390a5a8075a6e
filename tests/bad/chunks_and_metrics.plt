import "base/digits.plt"

model {
  loss = cross_entropy(chunks = 4, label_smoothing = 0.1)
}

evaluate {
  metrics = [loss, perplexity] #! W0683
}
