import "base/gpt.plt"

parallelism {
  pipeline     = 2
  microbatches = 4
  stages       = [2, 3] #! E0411
}
