"""Trainings that leave this machine: with other hosts and launchers, and handed to SLURM or Kubernetes."""
