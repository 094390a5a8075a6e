"""Measures a run: its collectives, its memory, its time, what each step did, and whether ranks agree."""
