"""`program.json` in a run directory: the job's program and the places of its ranks, as the launcher takes them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from dslc.compiler.facts.untrusted_files import read_json, replacing
from dslc.compiler.ir.codec import from_json, to_json
from dslc.compiler.ir.program import JobProgram, RankPlace

_NAME = "program.json"
_MOST = 1 << 28  # bytes of a file that is read


def write_program(run_dir: str, program: JobProgram, places: Sequence[RankPlace]) -> None:
    path = os.path.join(run_dir, _NAME)
    with replacing(path) as file:
        json.dump({"job": to_json(program), "places": to_json(tuple(places))}, file)


def read_program(run_dir: str) -> tuple[JobProgram, tuple[RankPlace, ...]]:
    told = read_json(os.path.join(run_dir, _NAME), _MOST)
    return from_json(JobProgram, told["job"]), tuple(from_json(RankPlace, place) for place in told["places"])
