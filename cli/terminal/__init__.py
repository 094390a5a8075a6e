"""What every command shares: exit codes, tables, errors in words, the version."""
