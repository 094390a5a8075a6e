"""Plan files: written beside a job or in a run directory, and taken in place of a job.

`plan` and `render` show a plan file from its contents. A page also compiles the job in the file, with the facts of its
data on this machine, and has memory over time if that gives the same plan. `run` first finds out what this machine has
of the facts that the plan rests on, and refuses to train if they differ; the programs of the ranks come from the graph
in the file.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.ir.program import TrainMode
from dslc.compiler.plan_facts import differences, facts_of
from dslc.compiler.plan_file import PlanFile, PlanFileError, read_plan
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.bounds import PLAN
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.files import TooLarge, read_bytes
from dslc.dsl.language.registry import Range
from dslc.dsl.meaning.load import LoadResult, load_kept
from dslc.dsl.words import plural
from dslc.jobs.check_job import inspect, inspect_for_run
from dslc.jobs.prepare_run import ALONE, LaunchContext, Ready, detect_launcher, place_ranks
from dslc.terminal.version import __version__

ANEW = "`dslc plan JOB --json` makes the plan anew"
_SHOWN = 5  # facts that differ, at most


def is_plan_file(path: str) -> bool:
    return path.lower().endswith(".json")


def open_plan(path: str, report: Report, changes: Sequence[str] = ()) -> PlanFile | None:
    """Returns the plan in a file, or None with the reason in the report. `changes`: options that would change it."""
    if changes:
        report.add(
            "E1006",
            f"`{changes[0]}` would change the plan in {path}, which is made already",
            None,
            help=f"give it to the job: `dslc plan JOB {changes[0]} --json`",
        )
        return None
    try:
        return read_plan(read_bytes(path, PLAN.most).decode())
    except PlanFileError as refused:
        report.add(refused.code, f"{path}: {refused}", None, help=refused.help)
    except TooLarge:
        report.add(PLAN.code, f"{path}: it is no plan: {PLAN.most:,} bytes are the most", None, help=ANEW)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "it is not text in UTF-8").lower()
        report.add("E0101", f"`{path}` cannot be read: {reason}", None)
    return None


def job_of(made: PlanFile, path: str) -> LoadResult:
    """Loads the job of the plan that was read from `path`, from the texts in the file."""
    folder = os.path.normpath(os.path.join(os.path.dirname(path), made.folder))
    name = os.path.normpath(os.path.join(folder, made.source.name))
    beside = os.path.abspath(os.path.join(folder, made.source.beside))
    return load_kept(dict(made.source.files), name, made.source.settings, beside)


def analysis_of_plan(made: PlanFile, path: str) -> Analysis | None:
    """Returns the analysis of the job of a plan from `path`; None if the job has another plan here, as by its data."""
    report = Report()
    analysis = inspect(job_of(made, path), report)
    has_plan = analysis is not None and not report.errors and compile_plan(analysis).plan.hash == made.plan.hash
    return analysis if has_plan else None


def prepare_plan(
    path: str,
    settings: Sequence[str],
    report: Report,
    *,
    profile: bool = False,
    trace: bool = False,
    around: LaunchContext = ALONE,
) -> Ready | None:
    """Returns the training of a plan file, or None with the facts that this machine lacks in the report."""
    made = open_plan(path, report, [f"--set {setting}" for setting in settings])
    if made is None or not _fits(made, path, report):
        return None
    loaded = job_of(made, path)
    if loaded.job is not None and isinstance(loaded.job.devices.nodes, Range):
        report.add(
            "E0815",
            f"{path} is the plan of an elastic job on {plural(made.plan.topology.nodes, 'node')}, which is planned "
            "anew when hosts come or go",
            None,
            help="give `run` the job; or make the plan of one count: `dslc plan JOB --set devices.nodes=… --json`",
        )
        return None
    counts = inspect_for_run(loaded, report, run=True)
    if not counts:
        return None
    (analysis,) = counts.values()
    world = detect_launcher(analysis, report, around)
    here = facts_of(analysis)
    if made.facts.model is None and here.model is not None:
        _untraced(path, report)
    else:
        _compare(path, list(differences(made.facts, here)), report)
    if report.errors:
        return None
    ready = place_ranks(loaded, Compiled(analysis=analysis, graph=made.graph), TrainMode(profile=profile, trace=trace))
    return dataclasses.replace(ready, world=world)


def _fits(made: PlanFile, path: str, report: Report) -> bool:
    """True if this dslc made the plan, and all of it."""
    if made.dslc != __version__:
        report.add(
            "E1003",
            f"{path} was made by dslc {made.dslc}, and this is dslc {__version__}",
            None,
            help=f"run it with that version; or {ANEW}",
        )
        return False
    if not made.complete:
        _untraced(path, report)
        return False
    return True


def _untraced(path: str, report: Report) -> None:
    report.add(
        "E1005",
        f"{path} leaves open what only a look at the data and at the user's own functions tells",
        None,
        help="make it with `dslc plan JOB --trace --json`, where the data is",
    )


def first_notes(texts: Sequence[str]) -> list[Note]:
    """Returns the first texts as notes, and the number of the others as the last one."""
    more = [f"and {plural(len(texts) - _SHOWN, 'other')}"] if len(texts) > _SHOWN else []
    return [Note(message=each) for each in (*texts[:_SHOWN], *more)]


def _compare(path: str, told: Sequence[str], report: Report) -> None:
    if not told:
        return
    report.add(
        "E1004",
        f"{path} was made for other facts than there are here: {plural(len(told), 'difference')}",
        None,
        notes=first_notes(told),
        help=f"put back what it was made for; or {ANEW}",
    )
