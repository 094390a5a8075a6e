"""What the job does not say: data on disk, hardware."""
