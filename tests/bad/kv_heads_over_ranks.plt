import "base/gpt.plt"

model {
  network = llama(layers = 2, width = 32, heads = 4, kv_heads = 1, hidden = 48, context = 16)  #! E0417
}

data {
  source = stdlib(context = 16)
}

devices {
  cpus = 2
}

parallelism {
  tensor = 2
}
