"""Tree to job and back."""
