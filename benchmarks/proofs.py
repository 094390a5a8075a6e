"""`python -m benchmarks.proofs FILE… --python PATH`: proves configurations, and prints a row of a table for each.

A file may be `FILE,FILE`: the files of one training, such as arguments and a DeepSpeed JSON.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile

from dslc.conversion.convert import convert
from dslc.proof.compare_curves import largest_difference
from dslc.proof.prove import Proof, prove
from dslc.proof.run_tool import ToolError
from dslc.terminal.exit_codes import CommandFailedError


def row(name: str, proof: Proof) -> str:
    """Returns the row: the largest difference of the losses, also at the tool's rates, and what was found."""
    apart = largest_difference(proof.tool.losses, proof.job.losses)
    rest = "" if proof.at_tool_rates is None else f"{_at_rates(proof):.0e}"
    fall = f"{proof.tool.losses[0]:.3f} to {proof.tool.losses[-1]:.3f}"
    differs = "; ".join(finding for finding in proof.findings[:3] if "the same" not in finding)
    cells = [name, proof.tool.name, fall, f"{apart:.0e}", rest, differs or "nothing"]
    return f"| {' | '.join(cells)} |"


def _at_rates(proof: Proof) -> float:
    assert proof.at_tool_rates is not None
    return largest_difference(proof.tool.losses, proof.at_tool_rates.losses)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proofs", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    for files in arguments.files:
        name = os.path.basename(files)
        folder = tempfile.mkdtemp(prefix="dslc-proof-")
        try:
            draft = convert(files.split(","))
            proof = prove(draft, model="", python=arguments.python, steps=arguments.steps, folder=folder)
            print(row(name, proof), flush=True)
            print("\n".join(f"    {change}" for change in proof.changes), file=sys.stderr, flush=True)
        except (ToolError, CommandFailedError) as error:
            print(f"| {name} | {error} |", flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
