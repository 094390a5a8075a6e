import "base/gpt.plt"

parallelism {
  gradients = powersgd(rank = 2) #! W0801
}

devices {
  nodes = 1..2
}
