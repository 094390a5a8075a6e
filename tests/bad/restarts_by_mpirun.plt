# Nobody starts failed ranks again under mpirun: that is said at once, and not that there is no checkpoint as well.
import "base/gpt.plt"

launch {
  with     = mpi()
  restarts = 3 #! E0827
}
