"""A user's own module as layers, by running it without memory."""
