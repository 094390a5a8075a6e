"""Checkpoints: when and how the state of a training is saved."""
