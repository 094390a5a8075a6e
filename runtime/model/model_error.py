"""What is wrong with a model that a user's own function made."""

from __future__ import annotations


class ModelError(RuntimeError):
    """A user's own function did not give a model; the message begins with the place in the job."""
