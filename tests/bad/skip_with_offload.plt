import "base/gpt.plt"

devices {
  gpus = 1
}

memory {
  offload = [optimizer, parameters] #! E0717
}

train {
  on_nonfinite = skip
}
