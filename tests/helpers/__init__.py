"""Shared by the tests: launchers of real processes, jobs and networks drawn at random, golden files, folders."""
