"""The sources of data: files, folders, tables and synthetic samples."""
