import "base/gpt.plt"

devices { cpus = 2 }
train { precision = fp8(skip = ["head", "heads"]) } #! E0740 W0742
