"""The error of a loss."""


class LossError(RuntimeError):
    """Output and target do not fit together, or a user's loss returns a wrong value."""
