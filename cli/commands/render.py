"""`dslc render`: the plan as a picture. `python -P -m dslc.commands.render PLAN.json FILE` draws a saved one."""

from __future__ import annotations

import argparse
import os
import sys

from dslc.compiler.plan_file import read_plan
from dslc.compiler.show.draw import draw
from dslc.compiler.show.page.plan_page import plan_page
from dslc.compiler.show.picture import write
from dslc.dsl.plain import plain
from dslc.terminal.exit_codes import GOOD, CommandFailedError


def main(arguments: argparse.Namespace) -> int:
    from dslc.commands.plan import plan_of

    if os.path.splitext(arguments.output)[1] not in (".svg", ".png", ".dot", ".html"):
        raise CommandFailedError(plain(f"{arguments.output}: a picture is .svg, .png, .dot or .html"))
    _, plan, _ = plan_of(arguments)
    if arguments.output.endswith(".html"):
        with open(arguments.output, "w", encoding="utf-8") as file:
            file.write(plan_page(plan, arguments.view))
    else:
        write(draw(plan, arguments.view), arguments.output)
    print(plain(f"{arguments.output} written"), file=sys.stderr)
    return GOOD


if __name__ == "__main__":
    os.nice(19)  # a training beside it comes first
    with open(sys.argv[1], encoding="utf-8") as kept:
        write(draw(read_plan(kept.read()).plan, "placement"), sys.argv[2])
