"""The runtime: runs a RankProgram on torch, and decides nothing."""
