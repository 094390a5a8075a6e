import "base/gpt.plt"

devices {
  backend = mpi #! W0801
}
