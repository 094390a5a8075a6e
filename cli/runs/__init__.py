"""The folders of runs: their names and locks, checkpoints, and the report."""
