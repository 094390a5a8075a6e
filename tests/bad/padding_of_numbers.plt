import "base/gpt.plt"

model {
  network = transformers("bert")
  loss    = mse()
}

data {
  source = python("own:padded")
  pad    = 0 #! E0606
}
