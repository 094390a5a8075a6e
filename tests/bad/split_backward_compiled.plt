import "base/gpt.plt"

parallelism {
  pipeline     = 2
  schedule     = zero_bubble
  microbatches = 4
}

train {
  compile = true #! E0414
}
