"""The language: text to Document to JobSpec, with every mistake at its span."""
