"""The vocabulary of the language: blocks, fields, calls, layers, units."""
