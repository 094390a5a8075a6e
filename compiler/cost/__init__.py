"""What a step costs a rank: bytes held, bytes moved, time."""
