"""Locks of plans: `job.lock` beside `job.plt` has the hash of a reviewed plan, and digests of all it follows from.

`dslc plan JOB --lock` writes one, and `dslc check JOB --locked` compares the plan of today with it. Where they differ
the cause is named: the job, the version of dslc, the figures of the devices, or other facts, such as the data.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import replace

from dslc.compiler.compile import compile_plan
from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.graph.stored import hash_without_lines, plan_hash
from dslc.compiler.ir.codec import DecodeError, from_json, parse, to_json
from dslc.compiler.plan_facts import PlanFacts, differences, facts_of
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.bounds import PLAN
from dslc.dsl.diagnostics import Report
from dslc.dsl.files import TooLarge, read_bytes
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.record import Record, record
from dslc.jobs.plan_file_input import first_notes
from dslc.terminal.version import __version__

FORMAT = 1


@record
class Lock(Record):
    """The hash of a plan, with and without the lines of the job's text, and what it follows from: digests of the job's
    texts by their paths, `--set`s, and facts. `without_lines` covers the predicted time if the job names a catalogue:
    each machine may predict it by a calibration of its own user.
    """

    format: int
    dslc: str
    plan: str
    without_lines: str
    texts: tuple[tuple[str, str], ...]
    settings: tuple[str, ...]
    facts: PlanFacts


def lock_path(path: str) -> str:
    return f"{os.path.splitext(path)[0]}.lock"


def write_lock(path: str, loaded: LoadResult, analysis: Analysis) -> None:
    """Writes the lock of the job at `path`, which was loaded and analysed. Raises OSError."""
    text = json.dumps(to_json(_lock_of(loaded, analysis)), sort_keys=True, indent=1) + "\n"
    with replacing(lock_path(path)) as file:
        file.write(text)


def check_lock(path: str, loaded: LoadResult, analysis: Analysis, report: Report) -> None:
    """Reports a plan that differs from the one in the lock of the job at `path`, with the causes."""
    locked = _read_lock(lock_path(path), f"`dslc plan {path} --lock` writes it", report)
    if locked is None:
        return
    now = _lock_of(loaded, analysis)
    if now.without_lines == locked.without_lines:
        return
    report.add(
        "E1008",
        f"the plan of {path} is {now.plan}, and {lock_path(path)} has {locked.plan}"
        if now.plan != locked.plan
        else f"the time that the plan of {path} predicts is not the one in {lock_path(path)}",
        None,
        notes=first_notes(list(_causes(locked, now))),
        help=f"`dslc diff REVISION:{path} {path}` shows what differs; `dslc plan {path} --lock` accepts it",
    )


def _lock_of(loaded: LoadResult, analysis: Analysis) -> Lock:
    graph, facts = compile_plan(analysis).graph, facts_of(analysis)
    by_job = analysis.job.devices.catalogue is not None
    return Lock(
        format=FORMAT,
        dslc=__version__,
        plan=plan_hash(graph),
        without_lines=hash_without_lines(graph, estimate=by_job),
        texts=tuple((name, hashlib.sha256(text.encode()).hexdigest()) for name, text in sorted(loaded.texts.items())),
        settings=loaded.settings,
        facts=facts if by_job else replace(facts, calibration=""),
    )


def _read_lock(path: str, remedy: str, report: Report) -> Lock | None:
    try:
        data = parse(read_bytes(path, PLAN.most).decode())
        if isinstance(data, dict) and data.get("format") != FORMAT:
            raise DecodeError(f"it is in format {data.get('format')!r}, and this dslc reads format {FORMAT}")
        return from_json(Lock, data)
    except (DecodeError, TooLarge, UnicodeDecodeError) as error:
        report.add("E1007", f"`{path}` is no lock of a plan: {error}", None, help=remedy)
    except OSError as error:
        report.add("E1007", f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}", None, help=remedy)
    return None


def _causes(locked: Lock, now: Lock) -> Iterator[str]:
    if locked.dslc != now.dslc:
        yield f"the version of dslc was {locked.dslc}, and is {now.dslc}"
    before, after = dict(locked.texts), dict(now.texts)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            change = "is new" if name not in before else "is not read any more" if name not in after else "has changed"
            yield f"the job: {name} {change}"
    if locked.settings != now.settings:
        yield f"the job: the settings were {_settings(locked)}, and are {_settings(now)}"
    for each in differences(locked.facts, replace(locked.facts, hardware=now.facts.hardware)):
        yield f"the catalogue: {each}"
    if locked.facts.calibration != now.facts.calibration:
        was, is_now = (each.facts.calibration or "none" for each in (locked, now))
        yield f"the catalogue: its calibration was {was}, and is {is_now}"
    for each in differences(locked.facts, replace(now.facts, hardware=locked.facts.hardware)):
        yield f"the facts: {each}"


def _settings(lock: Lock) -> str:
    return " ".join(f"--set {setting}" for setting in lock.settings) or "none"
