"""Reads configurations of other training tools, and writes them as a job."""
