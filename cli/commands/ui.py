"""`dslc ui`: the runs of a folder in a browser tab, until Ctrl-C. Reads, and writes nothing."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.compiler.ir.number_text import path_text
from dslc.dsl.plain import plain
from dslc.launching.run_state import runs_in
from dslc.terminal.exit_codes import GOOD, CommandFailedError
from dslc.ui.run_server import RunServer


def main(arguments: argparse.Namespace) -> int:
    folder = os.path.normpath(arguments.runs)
    if not os.path.isdir(folder) or not runs_in(folder):
        reason = "there is no run in it" if os.path.isdir(folder) else "there is no such folder"
        remedy = "`dslc run JOB` trains into runs/<job>/<time>, or into the folder that --out names"
        raise CommandFailedError(plain(f"{folder}: {reason}; {remedy}"))
    try:
        server = RunServer(folder, arguments.port)
    except OSError as error:
        reason = f"port {arguments.port} cannot be used ({error.strerror})"
        raise CommandFailedError(plain(f"{reason}: without --port, a free one is taken")) from None
    with server:
        print(plain(f"the runs of {path_text(folder)}: {server.address}"), flush=True)
        print("Ctrl-C ends it", file=sys.stderr, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return GOOD
    return GOOD
