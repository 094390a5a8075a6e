"""The facts that a plan rests on, and those in which another machine differs.

They are found out anew where a plan file is run. Paths are as on the graph, so that a plan and its files may move
together.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace

from dslc.compiler.facts.fingerprint import FileFact, fingerprints
from dslc.compiler.facts.hardware import Hardware
from dslc.compiler.facts.sources import FOUND_PATHS
from dslc.compiler.facts.transformers_file import configuration_file
from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.network_facts import OptimizerFacts
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.language.calls import Chat, PythonSource, parts_of
from dslc.dsl.language.job import JobSpec, python_calls
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.language.preferences import Preferences, ReferencedLoss
from dslc.dsl.language.registry import Call, fields
from dslc.dsl.paths import ResolvedPath, portable, resolved
from dslc.dsl.record import Record, record


@record
class PlanFacts(Record):
    """The facts that a plan rests on. `hardware` is of one device; `measured`: its memory was measured on the machine.
    `calibration` is the digest of the times by which the plan predicts a step; "" without measured times.
    `model` is None if the user's own module was not traced, `optimizer` if it is torch's or was not tried. `by_parts`:
    the model is too large for the machine to be made whole. `files` are the files that the ranks read, with paths as on
    the graph.
    """

    source: SourceFacts
    model: ModelFacts | None
    optimizer: OptimizerFacts | None = None
    hardware: Hardware
    measured: bool
    processes: int
    by_parts: bool
    files: tuple[FileFact, ...]
    calibration: str = ""


def facts_of(analysis: Analysis) -> PlanFacts:
    """Returns the facts that the plan of a job rests on, and looks at its files."""
    job, layout, model = analysis.job, analysis.layout, analysis.model
    origins = dict(_files(job, analysis.source))
    files = []
    for fact in fingerprints(origins):
        origin = origins.get(fact.path, next((each for each in origins.values() if each), None))
        files.append(replace(fact, path=portable(fact.path, job.folder, origin)))
    machine = analysis.facts.machine
    return PlanFacts(
        source=_portable(analysis.source),
        model=analysis.facts.model,
        optimizer=analysis.facts.optimizer,
        hardware=replace(layout.hardware, calibration=None, fit=None),
        measured=bool(machine and machine.gpus and layout.device == "cuda"),
        processes=layout.processes,
        by_parts=bool(model and model.reset),
        files=tuple(sorted(files, key=lambda fact: fact.path)),
        calibration=times.digest if (times := layout.hardware.calibration or layout.hardware.fit) else "",
    )


def _portable(source: SourceFacts) -> SourceFacts:
    """Returns the facts without paths, which `files` has, and without faults."""
    layouts = {name: value for name, value in source.found.items() if name not in FOUND_PATHS}
    parts = tuple(map(_portable, source.parts))
    return replace(source, found=layouts, missing="", help="", code="E0309", argument="", parts=parts)


def _files(job: JobSpec, source: SourceFacts) -> Iterator[tuple[str, ResolvedPath | None]]:
    """Yields the files and folders that the ranks read, each with the path of the job that led to it."""
    calls = parts_of(job.data.source)
    for call, facts in zip(calls, source.parts or (source,), strict=True):
        yield from _source_files(call, facts)
    if job.data.sampler is not None:
        for name in ("weights", "length"):
            if isinstance(path := getattr(job.data.sampler, name, None), ResolvedPath):
                yield path, path
    if job.model.start is not None and job.model.start.path:
        path = job.model.start.path
        with contextlib.suppress(Unreadable):  # a rule reports it
            weights = files_of(path)
            for file in dict.fromkeys((weights.path, *weights.files)):
                yield file, path if isinstance(path, ResolvedPath) else None
    if isinstance(job.model.loss, ReferencedLoss) and isinstance(reference := job.model.loss.reference, ResolvedPath):
        with contextlib.suppress(Unreadable):
            weights = files_of(reference)
            for file in dict.fromkeys((weights.path, *weights.files)):
                yield file, reference
    for own in python_calls(job):
        yield from _module(own.function, job.folder)
    if isinstance(job.model.network, TransformersNetwork) and (
        path := configuration_file(job.model.network, job.folder)
    ):
        yield path, ResolvedPath(path, job.model.network.path)


def _source_files(call: Call, source: SourceFacts) -> Iterator[tuple[str, ResolvedPath | None]]:
    named: list[object] = (
        [] if isinstance(call, PythonSource) else [getattr(call, field.name) for field in fields(type(call))]
    )
    paths = [path for path in _flat(named) if isinstance(path, ResolvedPath)]
    found = [
        path
        for name in sorted(FOUND_PATHS & source.found.keys())
        for path in _flat(source.found[name])
        if path and isinstance(path, str)
    ]
    for value in named:
        if isinstance(value, Call):
            yield from _source_files(value, SourceFacts())
    for path in (*found, *paths) if isinstance(call, Chat | Preferences) else found or paths:
        yield path, path if isinstance(path, ResolvedPath) else next(iter(paths), None)


def _flat(value: object) -> Iterator[object]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _module(function: str, folder: str) -> Iterator[tuple[str, ResolvedPath]]:
    """Yields the file of the module in which a user's function is, if it lies in the job's folder or the named one."""
    inside, _, named = function.rpartition("/")
    stem = os.path.join(resolved(inside, folder) or folder, *named.partition(":")[0].split("."))
    for path in (f"{stem}.py", os.path.join(stem, "__init__.py")):
        if os.path.isfile(path):
            yield path, ResolvedPath(path, inside or ".")
            return


def differences(planned: PlanFacts, here: PlanFacts) -> Iterator[str]:
    """Yields, in words, the facts in which this machine differs from the machine that the plan was made on.

    Times are left out: what ranks do does not depend on predictions.
    """
    before, now = ({fact.path: fact for fact in facts.files} for facts in (planned, here))
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            yield f"{path} is not here"
        elif path not in before:
            yield f"{path} was not there when the plan was made"
        elif before[path].size != now[path].size:
            yield f"{path} had {before[path].size:,} bytes or files, and has {now[path].size:,}"
        elif before[path] != now[path]:
            yield f"{path} has other contents"
    if here.measured and not planned.measured:
        here = replace(here, hardware=replace(here.hardware, memory=planned.hardware.memory))
    ones, others = (to_json(replace(facts, files=(), measured=True, calibration="")) for facts in (planned, here))
    yield from _differences(ones, others, "")


_SHOWN = 60  # characters of a value


def _differences(one: object, other: object, path: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(name), other.get(name), f"{path}.{name}" if path else name)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, f"{path}[{n}]")
    elif one != other:
        yield f"{path} was {_short(one)}, and is {_short(other)}"


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    text = "unknown" if value is None else text
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
