import "base/gpt.plt"

parallelism {
  gradients = powersgd(rank = 2) #! E0801
}

launch {
  restarts = 3
}
