import "base/gpt.plt"

parallelism {
  pipeline     = 4
  schedule     = zero_bubble
  microbatches = 4
}

memory {
  recompute = selective #! E0431
}
