import "base/digits.plt"

evaluate {
  metrics = [top_k(10)] #! E0313
}
