import "base/gpt.plt"

parallelism {
  tensor    = 2 #! E0801
  gradients = powersgd(rank = 2)
}

launch {
  restarts = 3
}
