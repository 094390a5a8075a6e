"""`dslc explain CODE`."""

from __future__ import annotations

import argparse
import sys

from dslc.dsl.codes import explain, titles
from dslc.dsl.language.suggest import nearest_choice
from dslc.terminal.exit_codes import GOOD, WRONG_USAGE


def main(arguments: argparse.Namespace) -> int:
    if arguments.code is None:
        for code, title in sorted(titles().items()):
            print(f"{code}  {title}")
        return GOOD
    code = arguments.code.strip("[]").upper()
    text = explain(code)
    if text is None:
        close = nearest_choice(code, titles())
        print(f"dslc: there is no code {code}{f'; did you mean {close}?' if close else ''}", file=sys.stderr)
        print("`dslc explain` lists them all", file=sys.stderr)
        return WRONG_USAGE
    print(text.rstrip())
    return GOOD
