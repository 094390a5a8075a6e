import "base/gpt.plt"

devices {
  gpus = 4
  kind = a100_80g
}

data {
  batch = 6 #! E0301
}

parallelism {
  zero = auto
}
