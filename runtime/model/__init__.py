"""Modules, their initial values and their loss, before any parallelism."""
