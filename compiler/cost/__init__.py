"""The cost of a step on one rank: bytes held, bytes moved, time."""
