"""One process: its lifetime, what it reports and how it fails."""
