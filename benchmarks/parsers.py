"""`python -m benchmarks.parsers TOOL FOLDER --python PATH`: holds `dslc convert` against the tool's own parser.

Reads every file of the folder with both, and prints how many both take, how many both refuse, and each file that they
differ about: one alone refuses it, or a value (batch, rate, length, clipping, precision, seed) is another one. PATH is
the Python that has Lightning, torchtitan 0.2 or Axolotl. Plugins of Axolotl are not imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys

from benchmarks.tool_parsers import READERS
from dslc.conversion.convert import convert
from dslc.conversion.draft import Draft
from dslc.dsl.json_value import Json

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tool_parsers.py")


def refusal(draft: Draft) -> str:
    """Returns what dslc refuses, or says that the tool refuses."""
    found = draft.report.found
    return "; ".join(
        entry.message
        for entry in found
        if entry.severity == "error" or (entry.code == "W1104" and "refuse" in entry.message)
    )


def values_of(draft: Draft) -> dict[str, Json]:
    """Returns the values of the job, by the names that the tools' values have."""
    texts = {path: setting.text for path, setting in draft.settings.items()}
    arguments = draft.optimizer.arguments if draft.optimizer is not None else {}
    context = re.search(r"context = (\d+)", texts.get("data.source", ""))
    return {
        "devices": list(draft.devices) if draft.devices else None,
        "micro": draft.batch.micro,
        "accumulation": draft.batch.accumulation,
        "lr": _number(arguments.get("lr")),
        "weight_decay": _number(arguments.get("weight_decay", "0")),
        "precision": texts.get("train.precision", "fp32").partition("(")[0],
        "steps": _number(texts.get("train.steps")),
        "epochs": _number(texts.get("train.epochs")),
        "context": int(context[1]) if context else None,
        "clip": _number(texts.get("train.clip", "0")),
        "seed": _number(texts.get("train.seed")),
    }


def _number(text: str | None) -> float | None:
    """Returns the first number of a text such as `0.1` or `value(0.5)`."""
    match = re.search(r"-?\d[\d.]*(e[-+]?\d+)?", text or "")
    return float(match[0]) if match else None


def compare(path: str, tool: str, outcome: Json) -> tuple[str, str]:
    """Returns the kind of the outcome for a file, and what differs, or an empty text."""
    draft = convert([path], tool=tool)
    refused = refusal(draft)
    if isinstance(outcome, str):
        return ("refused by both", "") if refused else ("refused by the tool alone", outcome)
    if refused or not isinstance(outcome, dict):
        return "refused by dslc alone", refused
    values = values_of(draft)
    if values["devices"] is None:  # `auto`: a parameter of the job
        outcome = {key: value for key, value in outcome.items() if key != "devices"}
    differing = [f"{key} {value}, in the job {values[key]}" for key, value in outcome.items() if value != values[key]]
    return "taken by both", "; ".join(differing)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parsers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=sorted(READERS), metavar="TOOL", help=", ".join(sorted(READERS)))
    parser.add_argument("folder", metavar="FOLDER", help="configuration files of the tool")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="the Python that has the tool")
    arguments = parser.parse_args()
    paths = sorted(entry.path for entry in os.scandir(arguments.folder) if entry.is_file())
    run = subprocess.run([arguments.python, _SCRIPT, arguments.tool, *paths], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{arguments.python} cannot run the parser of {arguments.tool}:\n{run.stderr}")
    counts: dict[str, int] = {}
    for path, outcome in json.loads(run.stdout).items():
        kind, difference = compare(path, arguments.tool, outcome)
        counts[kind] = counts.get(kind, 0) + 1
        if difference:
            print(f"{os.path.basename(path)}: {kind}: {difference}")
    for kind in sorted(counts, reverse=True):
        print(f"{kind}: {counts[kind]} of {len(paths)}")


if __name__ == "__main__":
    main()
