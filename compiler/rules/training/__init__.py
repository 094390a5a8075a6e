"""Rules for the optimizer, the step, evaluations and checkpoints."""
