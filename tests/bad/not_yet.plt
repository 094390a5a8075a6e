import "base/gpt.plt"

parallelism {
  zero = 3 #! E0801
}

memory {
  recompute = full
  offload   = [optimizer] #! W0103
}

checkpoint {
  every = 5 steps
}
