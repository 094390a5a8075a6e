"""What may be said: blocks, fields, calls, layers, units."""
