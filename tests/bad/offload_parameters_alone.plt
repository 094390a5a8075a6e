import "base/gpt.plt"

devices {
  gpus = 2
}

memory {
  offload = [parameters] #! E0715
}
