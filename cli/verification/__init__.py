"""Compares a training under its plan with the same training in one process."""
