"""Loggers of libraries: one process beside the ranks, which feeds them with the records and files of a run."""
