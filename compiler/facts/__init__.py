"""Facts that the job does not state: data on disk, hardware."""
