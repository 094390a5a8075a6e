import "base/gpt.plt"

model {
  network = transformers("gpt2")
}

data {
  source = stdlib(context = 32)
  pad    = 0 #! E0606
}
