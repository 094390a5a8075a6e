"""Tools that measure the tests themselves, and that no test imports as a helper."""
