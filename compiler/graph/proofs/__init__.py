"""Proofs of a plan's propositions, one file for each subject."""
