"""What a run really did."""
