"""Rules for what a job trains on: its sources, samples and batches."""
