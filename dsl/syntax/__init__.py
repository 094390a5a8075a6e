"""Parses text to a tree, and formats a tree as text."""
