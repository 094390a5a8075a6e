import "base/gpt.plt"

parallelism {
  pipeline     = 2
  microbatches = 4
}

memory {
  recompute = budget(4 kB) #! E0509
}
