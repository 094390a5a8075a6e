"""The layout of a job on devices: axes, shares, shards, cuts, schedule tables."""
