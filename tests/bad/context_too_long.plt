import "base/gpt.plt"

data {
  source = stdlib(context = 64)
}
