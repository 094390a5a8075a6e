"""The runs of a folder in a browser tab: their jobs and curves, while they train."""
