"""The readers of each tool, and the keys that they do not carry."""
