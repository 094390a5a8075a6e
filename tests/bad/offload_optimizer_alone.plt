import "base/gpt.plt"

devices {
  gpus = 2
}

parallelism {
  zero = 2
}

memory {
  offload = [optimizer] #! E0716
}

train {
  clip = 1.0
}
