"""The plan graph, its passes, and the proofs over it."""
