"""Pipeline stages: cutting a module, recording a user's own, and running stages by torch's schedule."""
