"""Sweeps: several trainings one after another or at once, and the table of what they came to."""
