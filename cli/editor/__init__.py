"""What `dslc lsp` adds to the functions of dsl/editor: the analysis of a text, in a process that can be cancelled."""
