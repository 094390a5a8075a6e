import "base/gpt.plt"

parallelism { zero = 3 }
train { precision = fp8(rowwise, emulate = true, all_gather = true) } #! E0744
