"""Rules for the axes of parallelism and for what ranks exchange."""
