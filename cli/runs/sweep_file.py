"""The file of a sweep, `sweep.json`: the paths that vary, and the sub-folder and the values of each training.

`dslc run` and `dslc submit` write it into the folder of a sweep before the first of its trainings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from dslc.compiler.facts.untrusted_files import read_json, replacing
from dslc.compiler.ir.codec import from_json
from dslc.compiler.ir.program import JobProgram
from dslc.dsl.meaning.load import LoadResult
from dslc.runs.metric_summary import directions
from dslc.runtime.checkpoint.files import is_plain_name

NAME = "sweep.json"
_MOST = 1 << 24  # bytes of a file that is read


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep as written in its folder: `runs` are pairs (sub-folder, a value for each of `paths`); `highest` says of a
    metric whether its highest value is the best.
    """

    job: str
    paths: tuple[str, ...]
    runs: tuple[tuple[str, tuple[str, ...]], ...]
    highest: Mapping[str, bool]


def write_sweep(folder: str, loaded: LoadResult, names: Sequence[str], program: JobProgram) -> None:
    """Writes `sweep.json`: the combinations of `loaded` are trained in sub-folders of these names, as `program`."""
    assert loaded.job is not None
    sweep = Sweep(
        job=program.file,
        paths=tuple(path for path, _ in loaded.combinations[0]),
        runs=tuple(
            (name, tuple(text for _, text in settings))
            for name, settings in zip(names, loaded.combinations, strict=True)
        ),
        highest=directions(loaded.job),
    )
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, NAME)
    with replacing(path) as file:
        json.dump(asdict(sweep), file, indent=1)
        file.write("\n")


def read_sweep(folder: str) -> Sweep | None:
    try:
        found = from_json(Sweep, read_json(os.path.join(folder, NAME), _MOST))
    except (OSError, ValueError):
        return None
    valid = all(is_plain_name(name) and len(values) == len(found.paths) for name, values in found.runs)
    return found if valid else None
