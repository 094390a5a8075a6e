"""Traces one of several equal blocks, and uses its facts for the rest."""
