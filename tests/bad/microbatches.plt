import "base/digits.plt"

parallelism {
  microbatches = 5 #! E0302
}
