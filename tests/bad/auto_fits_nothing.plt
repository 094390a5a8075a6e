import "base/gpt.plt"

devices {
  gpus = 4
  kind = a100_80g
}

parallelism {
  tensor = auto #! E0490
}

memory {
  recompute = auto
  limit     = 1MiB
}
