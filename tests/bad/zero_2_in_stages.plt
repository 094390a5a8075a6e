import "base/gpt.plt"

parallelism {
  data         = 2
  pipeline     = 2
  zero         = 2 #! W0433
  microbatches = 4
}
