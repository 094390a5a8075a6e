"""The parts of a training assembled, and one step of them."""
