"""The functions of `import dslc`."""
