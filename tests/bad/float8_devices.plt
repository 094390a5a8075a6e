import "base/gpt.plt"

devices { gpus = 2, kind = a100_80g }
train { precision = fp8 } #! E0740
