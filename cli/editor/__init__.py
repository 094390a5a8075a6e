"""The language server of `dslc lsp`: analyses texts for dsl/editor, in a process that can be cancelled."""
