"""One module for each command of `dslc`: `main(arguments) -> exit status`."""
