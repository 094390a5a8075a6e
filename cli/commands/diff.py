"""`dslc diff`: what differs between two plans."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dslc.compiler.comparison import PlanDifference, compare_plans
from dslc.compiler.graph.stored import plan_hash
from dslc.compiler.ir.codec import to_json
from dslc.compiler.show.page.content import PlanComparison
from dslc.dsl.plain import plain, plain_lines
from dslc.jobs.compared_plans import PlanSide, checkpoint_incompatibilities, comparison_of, open_plan_side

SAME, DIFFERENT = 0, 1  # exit statuses, as of `diff`; that of CommandFailedError if a plan cannot be made


def main(arguments: argparse.Namespace) -> int:
    first_side = open_plan_side(arguments.first, [], arguments.trace)
    second_side = open_plan_side(arguments.second or arguments.first, arguments.settings, arguments.trace)
    if arguments.json:
        changes = compare_plans(first_side.graph, second_side.graph)
        json.dump(_json(first_side, second_side, changes), sys.stdout, indent=2)
        print()
        return DIFFERENT if changes else SAME
    comparison = comparison_of(first_side, second_side)
    lines = _markdown if arguments.markdown else _text
    print(plain_lines("\n".join(lines(first_side.name, second_side.name, comparison))))
    return DIFFERENT if comparison.checkpoints else SAME


# ------------------------------------------------------------------------------------------------------------ output


def _text(first_name: str, second_name: str, comparison: PlanComparison) -> list[str]:
    lines = [f"{first_name}  ->  {second_name}: {comparison.summary}"]
    if comparison.checkpoints:
        lines += [f"checkpoints: {comparison.checkpoints}"]
    for section in comparison.sections:
        lines += ["", section.title]
        widths = [max(len(row[n]) for row in section.rows) for n in range(3)]
        for field, old_value, new_value, relative in section.rows:
            lines.append(
                f"  {field:{widths[0]}}  {old_value:>{widths[1]}}  ->  {new_value:<{widths[2]}}  {relative}".rstrip()
            )
    return lines


def _markdown(first_name: str, second_name: str, comparison: PlanComparison) -> list[str]:
    lines = [f"**`{first_name}` → `{second_name}`: {comparison.summary}**"]
    if comparison.checkpoints:
        lines += ["", f"Checkpoints: {comparison.checkpoints}."]
    for section in comparison.sections:
        lines += ["", f"| {section.title} | before | after | |", "| --- | --- | --- | --- |"]
        lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in section.rows]
    return lines


def _json(first_side: PlanSide, second_side: PlanSide, changes: Sequence[PlanDifference]) -> dict[str, object]:
    return {
        "before": {"name": plain(first_side.name), "hash": plan_hash(first_side.graph)},
        "after": {"name": plain(second_side.name), "hash": plan_hash(second_side.graph)},
        "same_training": not any(change.section == "training" for change in changes),
        "checkpoint_misfits": checkpoint_incompatibilities(first_side.graph, second_side.graph, changes),
        "changes": [to_json(change) for change in changes],
    }
