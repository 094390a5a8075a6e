import "base/digits.plt"

parallelism {
  pipeline     = 2
  schedule     = interleaved_1f1b
  microbatches = 4
  stages       = [1, 1] #! E0410
}
