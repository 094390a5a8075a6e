import "base/gpt.plt"

data {
  pad = 0 #! E0606
}
