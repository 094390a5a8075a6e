"""Runs another tool and a converted job from the same weights, and compares their curves."""
