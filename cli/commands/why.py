"""`dslc why`: the cause of a stall or of an end of a run, from the files in its folder. Starts nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from dslc.compiler.ir.number_text import time_text
from dslc.dsl.plain import plain, plain_lines
from dslc.launching.run_state import RunState, run_states, runs_in
from dslc.runtime.process.positions import FOLDER, HostPositions, read_positions
from dslc.runtime.process.run_status import ALIVE
from dslc.runtime.process.stall_cause import explain, positions_in_words
from dslc.terminal.exit_codes import GOOD, CommandFailedError

_STALLED = 5.0  # seconds without a change, after which the positions are those of a stall


def main(arguments: argparse.Namespace) -> int:
    folder = os.path.normpath(arguments.run)
    runs = runs_in(folder) if os.path.isdir(folder) else []
    if folder not in runs:
        several = f"it holds {len(runs)} runs: name one" if runs else "there is no run in it"
        raise CommandFailedError(plain(f"{folder}: {several if os.path.isdir(folder) else 'there is no such folder'}"))
    (run,) = run_states([folder])
    hosts, faults = read_positions(folder)
    for fault in faults:
        print(plain(f"dslc: {fault}"), file=sys.stderr)
    lines = _lines(run, hosts)
    if arguments.json:
        json.dump(
            {"run": folder, "state": run.state, "cause": lines, "hosts": [asdict(host) for host in hosts]}, sys.stdout
        )
        print()
        return GOOD
    print(plain(f"{folder}: {run.line()}"))
    if run.state == "failed" and "\n" in run.why:
        print(plain_lines(run.why))
    for line in lines:
        print(plain(line))
    return GOOD


def _lines(run: RunState, hosts: Sequence[HostPositions]) -> list[str]:
    """Returns the cause and the positions of a run's ranks, as lines."""
    if run.state == "done":
        return []
    if not hosts:
        return [f"it has no file in {FOLDER}/: its ranks have not started, or an older dslc runs it"]
    ranks = {place.rank for host in hosts for place in host.ranks}
    missing = hosts[0].world - len(ranks)
    unseen = [f"{missing} of {hosts[0].world} ranks write their positions elsewhere"] if missing > 0 else []
    if run.state not in ALIVE:
        return [*explain(hosts, live=False), *unseen]
    seconds = min(place.seconds + host.age for host in hosts for place in host.ranks)
    if seconds < _STALLED:
        return ["it goes on:", *positions_in_words(hosts), *unseen]
    return [f"no progress for {time_text(round(seconds))}:", *explain(hosts), *unseen]
