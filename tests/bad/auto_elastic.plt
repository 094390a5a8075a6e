import "base/gpt.plt"

devices {
  nodes = 1..4
  gpus  = 2
  kind  = a100_80g
}

parallelism = auto #! E0492

checkpoint {
  every = 100 steps
}
