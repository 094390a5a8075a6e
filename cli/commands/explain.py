"""`dslc explain CODE`."""

from __future__ import annotations

import argparse

from dslc.dsl.codes import explain, titles
from dslc.dsl.language.suggest import nearest_choice
from dslc.terminal.exit_codes import GOOD, CommandFailedError


def main(arguments: argparse.Namespace) -> int:
    if arguments.code is None:
        for code, title in sorted(titles().items()):
            print(f"{code}  {title}")
        return GOOD
    code = arguments.code.strip("[]").upper()
    text = explain(code)
    if text is None:
        close = nearest_choice(code, titles())
        hint = f"; did you mean {close}?" if close else ""
        raise CommandFailedError(f"there is no code {code}{hint}\n`dslc explain` lists them all")
    print(text.rstrip())
    return GOOD
