"""Sweeps: several trainings one after another or at once, and the table of their results."""
