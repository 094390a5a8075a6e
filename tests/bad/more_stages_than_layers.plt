import "base/digits.plt"

parallelism {
  pipeline     = 2 #! E0410
  schedule     = interleaved_1f1b
  microbatches = 4
  stages       = [1, 1]
}
