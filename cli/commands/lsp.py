"""`dslc lsp`: the language server, over standard input and output."""

from __future__ import annotations

import argparse
import importlib.util
import os

from dslc.terminal.exit_codes import GOOD, CommandFailedError


def main(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("pygls") is None:
        raise CommandFailedError("the library `pygls` is not installed\nhelp: `pip install 'dslc[lsp]'`")
    from dslc.editor.server import server

    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no message of the protocol
    server.start_io(stdout=replies)
    return GOOD
