"""Samples, their order, and batches of them."""
