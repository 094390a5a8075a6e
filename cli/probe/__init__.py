"""Probes for facts that a job does not state, before anything is planned: of the machine, the data and the user's own
code.
"""
