import "base/gpt.plt"

parallelism {
  pipeline     = 2
  microbatches = 4
  schedule     = zero_bubble
}

memory {
  recompute = budget(1 GiB) #! E0444
}
