"""The optimizers that torch has not, or has for some parameters alone."""
