"""Benchmarks: speed compared with a hand-written loop. Nothing here gates a change; README.md records the figures."""
