"""`dslc diff`: what differs between two plans."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dslc.compiler.comparison import SECTIONS, PlanDifference, compare_plans, rows, summary
from dslc.compiler.graph.stored import plan_hash
from dslc.compiler.ir.codec import to_json
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.compared_plans import TITLES, PlanSide, checkpoint_text, misfits, open_side

SAME, DIFFERENT = 0, 1  # exit statuses, as of `diff`; that of CommandFailedError if a plan cannot be made


def main(arguments: argparse.Namespace) -> int:
    first_side = open_side(arguments.first, [], arguments.trace)
    second_side = open_side(arguments.second or arguments.first, arguments.settings, arguments.trace)
    changes = compare_plans(first_side.graph, second_side.graph)
    if arguments.json:
        json.dump(_json(first_side, second_side, changes), sys.stdout, indent=2)
        print()
    else:
        lines = _markdown if arguments.markdown else _text
        print(plain_lines("\n".join(lines(first_side, second_side, changes))))
    return DIFFERENT if changes else SAME


# ------------------------------------------------------------------------------------------------------------ output


def _text(first_side: PlanSide, second_side: PlanSide, changes: Sequence[PlanDifference]) -> list[str]:
    lines = [f"{first_side.name}  ->  {second_side.name}: {summary(changes)}"]
    if not changes:
        return lines
    lines += [f"checkpoints: {checkpoint_text(misfits(first_side.graph, second_side.graph, changes))}"]
    for section in SECTIONS:
        table = rows(changes, section)
        lines += ["", TITLES.get(section, section)] if table else []
        widths = [max((len(row[n]) for row in table), default=0) for n in range(3)]
        for field, old_value, new_value, relative in table:
            lines.append(
                f"  {field:{widths[0]}}  {old_value:>{widths[1]}}  ->  {new_value:<{widths[2]}}  {relative}".rstrip()
            )
    return lines


def _markdown(first_side: PlanSide, second_side: PlanSide, changes: Sequence[PlanDifference]) -> list[str]:
    lines = [f"**`{first_side.name}` → `{second_side.name}`: {summary(changes)}**"]
    if not changes:
        return lines
    lines += ["", f"Checkpoints: {checkpoint_text(misfits(first_side.graph, second_side.graph, changes))}."]
    for section in SECTIONS:
        table = rows(changes, section)
        lines += (
            ["", f"| {TITLES.get(section, section)} | before | after | |", "| --- | --- | --- | --- |"] if table else []
        )
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table]
    return lines


def _json(first_side: PlanSide, second_side: PlanSide, changes: Sequence[PlanDifference]) -> dict[str, object]:
    return {
        "before": {"name": plain(first_side.name), "hash": plan_hash(first_side.graph)},
        "after": {"name": plain(second_side.name), "hash": plan_hash(second_side.graph)},
        "same_training": not any(change.section == "training" for change in changes),
        "checkpoint_misfits": misfits(first_side.graph, second_side.graph, changes),
        "changes": [to_json(change) for change in changes],
    }
