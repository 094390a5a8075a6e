"""Stages: a module cut, written down, and run by torch's schedule."""
