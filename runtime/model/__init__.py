"""Modules, their numbers and their loss, before any parallelism."""
