import "base/gpt.plt"

parallelism {
  zero = 3 #! E0801
}

memory {
  recompute = full #! E0801
  offload   = [optimizer] #! E0801
}

checkpoint {
  every = 5 steps #! E0801
}
