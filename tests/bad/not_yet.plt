import "base/gpt.plt"

parallelism {
  gradients = decentralized() #! W0801 W0630
}

devices {
  backend = mpi
}
