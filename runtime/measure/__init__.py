"""Measures a run: its collectives, its memory, its time, and what each step did."""
