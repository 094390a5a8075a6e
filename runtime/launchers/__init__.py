"""Launchers of others (torchrun, mpirun, srun): what their variables say of a process, and where its peers meet."""
