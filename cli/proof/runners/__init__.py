"""Trains the network of a job with another tool, one module for each tool, in the interpreter that has the tool."""
