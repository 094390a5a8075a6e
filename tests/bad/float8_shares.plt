import "base/gpt.plt"

model { network = gpt(layers = 2, width = 48, heads = 2, context = 32, vocab = 256) }
parallelism { tensor = 2 }
devices { cpus = 2 }
train { precision = fp8(emulate = true, skip = "head") } #! E0741
