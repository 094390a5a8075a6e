"""The runtime: carries out a RankProgram on torch, and decides nothing."""
