"""A source of the user's own: what it gives, found by reading a few of its samples."""
