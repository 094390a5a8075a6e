import "base/gpt.plt"

devices {
  gpus = 2
  cpus = none
}

parallelism {
  tensor = 2
  async_tensor = true #! E0447
}
