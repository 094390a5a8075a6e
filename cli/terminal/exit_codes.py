"""The exit statuses of the command."""

GOOD, JOB_AT_FAULT, WRONG_USAGE, TRAINING_FAILED = 0, 1, 2, 3
INTERRUPTED = 130  # 128 + SIGINT, as in shells
