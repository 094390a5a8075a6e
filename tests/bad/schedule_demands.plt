import "base/gpt.plt"

parallelism {
  pipeline     = 4
  schedule     = 1f1b
  microbatches = 2 #! E0412
}
