import "base/gpt.plt"

parallelism {
  tensor = 2
  async_tensor = true #! E0447
}
