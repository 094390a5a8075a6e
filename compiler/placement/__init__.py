"""How a job lies on devices: axes, shares, shards, cuts, schedule tables."""
