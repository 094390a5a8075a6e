import "base/gpt.plt"

parallelism { zero = 2 }
train { precision = fp8(emulate = true, all_gather = true) } #! E0744
