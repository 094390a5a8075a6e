"""How ranks find each other, and what they may send."""
