"""Resolves a tree to a job, and writes a job as text."""
