"""The work of the ranks, step after step: train, evaluate, predict."""
