"""The language: text to Document to JobSpec, with every mistake at its span. Imports only the standard library and lark."""
