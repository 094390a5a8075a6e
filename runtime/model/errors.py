"""The errors of user code that makes no valid model or loss."""


class LossError(RuntimeError):
    """Output and target do not fit, or a user's loss returns a wrong value. `remedy` says what to do, if known."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy


class ModelError(RuntimeError):
    """A user's own function did not return a model; the message begins with the line of the job."""
