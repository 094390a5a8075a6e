"""The error for a user's own function that makes no valid model."""

from __future__ import annotations


class ModelError(RuntimeError):
    """A user's own function did not return a model; the message begins with the line of the job."""
