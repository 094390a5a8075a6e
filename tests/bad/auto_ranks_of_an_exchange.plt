import "base/gpt.plt"

devices {
  gpus = 4
  kind = a100_80g
}

parallelism {
  data      = auto #! E0493
  gradients = powersgd()
}
