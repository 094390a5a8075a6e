"""Pure functions over the text of a job and a position in it, for editors and for `dslc check --fix`."""
