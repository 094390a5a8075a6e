"""The language server of `dslc lsp`: it adds to dsl/editor the analysis of a text, in a process that can be
cancelled.
"""
