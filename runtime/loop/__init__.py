"""What is done step after step: train, evaluate, predict."""
