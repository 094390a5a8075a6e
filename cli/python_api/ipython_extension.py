"""The extension of IPython: `%load_ext dslc` adds the cell magic `%%plt`, and shows plans as diagrams."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any, NoReturn

from dslc.compiler.ir.plan import PlanView
from dslc.python_api import functions

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class MagicUsageError(ValueError):
    """Options that `%%plt` does not have; the text says which it has."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MagicUsageError(f"%%plt: {message}\n{self.format_usage().rstrip()}")


def parse_line(line: str) -> argparse.Namespace:
    """Returns the options of `%%plt`. Raises MagicUsageError."""
    parser = _Parser(prog="%%plt", add_help=False)
    parser.add_argument("action", nargs="?", choices=("check", "plan", "run"), default="plan")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", dest="settings")
    parser.add_argument("--out", metavar="FOLDER", help="the run directory")
    parser.add_argument("--name", metavar="VARIABLE", help="the variable that gets the result")
    return parser.parse_args(shlex.split(line))


def register(shell: InteractiveShell) -> None:
    """Adds `%%plt` and the display of plans to a shell."""

    def plt(line: str, cell: str) -> object:
        """Checks, plans or trains the job in the cell: `%%plt [check|plan|run] [--set PATH=VALUE] [--name NAME]`."""
        options = parse_line(line)
        result: object
        if options.action == "check":
            result = functions.check(f"{cell}\n", options.settings)
        elif options.action == "plan":
            result = functions.compile(f"{cell}\n", options.settings)
        else:
            result = functions.run(f"{cell}\n", options.settings, out=options.out)
        if options.name:
            shell.user_ns[options.name] = result
        return result

    untyped: Any = shell
    untyped.register_magic_function(plt, "cell", "plt")
    untyped.display_formatter.mimebundle_formatter.for_type(PlanView, _show_plan)


def _show_plan(plan: PlanView, include: object = None, exclude: object = None) -> dict[str, str]:
    from dslc.compiler.show.notebook_view import plan_bundle

    return plan_bundle(plan)
