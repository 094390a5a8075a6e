"""Techniques that change modules in place on one rank."""
