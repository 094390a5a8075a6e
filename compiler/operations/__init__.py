"""The operations of a rank in a step with others, one file for each engine: what they carry, and where they stand."""
