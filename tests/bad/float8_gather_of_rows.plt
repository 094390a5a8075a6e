import "base/gpt.plt"

devices { cpus = 5 }
data { batch = 20 }
parallelism { zero = 3 }
train { precision = fp8(emulate = true, all_gather = true) } #! E0744
