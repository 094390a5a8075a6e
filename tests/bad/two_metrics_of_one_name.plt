import "base/gpt.plt"

data {
  validation = 5%
}

evaluate {
  metrics = [loss, f1, python("own_metrics:f1")] #! E0316
}
