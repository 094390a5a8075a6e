import "base/gpt.plt"

parallelism {
  gradients = powersgd(rank = 2) #! W0801
}

devices {
  backend = mpi
}
