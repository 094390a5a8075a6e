import "base/gpt.plt"

parallelism {
  data         = 2
  pipeline     = 2
  zero         = 3 #! E0430
  schedule     = zbv
  microbatches = 4
}
