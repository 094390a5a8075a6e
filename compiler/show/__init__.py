"""A plan as text and as pictures."""
