"""`dslc completion`: a script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse

from dslc.terminal.exit_codes import GOOD

_FILES = ("FILE", "PATH", "JSON", "A", "B")
_FOLDERS = ("DIR", "RUN")


def main(arguments: argparse.Namespace) -> int:
    import shtab

    parser: argparse.ArgumentParser = arguments.build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    jobs = shtab.glob("*.plt")
    for command in commands.choices.values():
        for action in command._actions:
            if action.metavar == "JOB":
                action.complete = jobs
            elif action.metavar in _FILES:
                action.complete = shtab.FILE
            elif action.metavar in _FOLDERS:
                action.complete = shtab.DIRECTORY
    print(shtab.complete(parser, arguments.shell))
    return GOOD
