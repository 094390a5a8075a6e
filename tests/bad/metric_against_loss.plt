import "base/digits.plt"

evaluate {
  metrics = [loss, perplexity, mse] #! E0312
}
