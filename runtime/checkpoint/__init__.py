"""When and how the state of a training is kept."""
