model = gpt2 #! E0113
data { source = stdlib(), batch = 16 }
devices { gpus = 8 }
parallelism { sharding = 3 } #! E0107
train { steps = 10, optimizer = adamw(lr = 0.001) }
