"""The shared parts of all commands: exit codes, tables, errors in words, the version."""
