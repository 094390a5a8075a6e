"""The parallel axes, one file for each engine, and the optimizers over them."""
