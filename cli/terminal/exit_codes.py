"""The exit statuses of the command."""

GOOD, JOB_AT_FAULT, WRONG_USAGE, TRAINING_FAILED = 0, 1, 2, 3
INTERRUPTED = 130  # 128 + SIGINT, as in shells


class CommandFailedError(Exception):
    """Ends a command with an exit status. The command line shows the text; an empty one was shown already."""

    def __init__(self, message: str = "", status: int = WRONG_USAGE) -> None:
        super().__init__(message)
        self.status = status
