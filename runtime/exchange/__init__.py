"""Exchanges: how the ranks of the data axis agree in a step, one file for each; docs/exchanges.md has their rules."""
