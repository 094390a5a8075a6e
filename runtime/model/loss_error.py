"""The error of a loss."""


class LossError(RuntimeError):
    """Output and target do not fit together, or a user's loss returns a wrong value. `remedy` says what to do, if that
    is known.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy
