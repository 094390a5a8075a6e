"""Assembles the parts of a training, and runs one step of them."""
