"""From a job file to an analysis, and on to ranks that are ready to start."""
