import "base/gpt.plt"

devices {
  nodes = 2
  gpus  = 1
  cpus  = none
}

parallelism {
  tensor = 2
  async_tensor = true #! E0447
}

train {
  compile = true
}
