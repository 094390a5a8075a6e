import "base/gpt.plt"

parallelism { tensor = 2, zero = 3 }
train { precision = fp8(emulate = true, all_gather = true) } #! E0744
