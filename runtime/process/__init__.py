"""What a process is, says and dies of."""
