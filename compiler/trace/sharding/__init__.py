"""Proves that a module on shards of its tensors computes the same as the whole module."""
