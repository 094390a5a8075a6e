"""From a job to a run directory that is ready to be launched, and the launch. Shared by `dslc run` and `dslc.run`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from dslc.compiler.compile import Compiled, compile_plan
from dslc.compiler.facts.untrusted_files import replacing
from dslc.compiler.ir.program import JobProgram, Mode, RankPlace, TrainMode
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Report
from dslc.dsl.language.calls import SSH
from dslc.dsl.language.registry import Range
from dslc.dsl.meaning.load import LoadResult
from dslc.dsl.meaning.write import anchored, write
from dslc.dsl.plain import plain_lines
from dslc.dsl.words import plural
from dslc.jobs.check_job import inspect_for_run
from dslc.jobs.choose_plan import with_choice
from dslc.jobs.launcher_environment import counts_there, world_for
from dslc.jobs.preflight import check_needs
from dslc.jobs.run_picture import draw_plan
from dslc.jobs.worst_batch import check_worst_batches
from dslc.loggers.start import feed_loggers
from dslc.probe.child import import_while_children_work
from dslc.runs.plan_file_output import file_of
from dslc.runs.run_folder import claim_folder
from dslc.runtime.launchers.world import World
from dslc.runtime.process.program_file import write_program
from dslc.runtime.process.run_status import begin

if TYPE_CHECKING:
    from dslc.probe.child import ChildAnswer
    from dslc.runtime.measure.report import RunReport
    from dslc.runtime.process.failure import Outcome


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A job that may start, with the contents of its run directory."""

    loaded: LoadResult
    compiled: Compiled
    program: JobProgram
    places: tuple[RankPlace, ...]
    world: World | None = None  # if a launcher of others has started this process
    counts: Mapping[int, Analysis] = field(default_factory=dict)  # of an elastic job, by the number of nodes; none if
    # a launcher of others has decided on one

    def on(self, nodes: int) -> Ready:
        """Returns an elastic job as it is trained on `nodes` nodes."""
        ready = place_ranks(self.loaded, compile_plan(self.counts[nodes]), self.program.mode)
        return dataclasses.replace(ready, world=self.world, counts=self.counts)


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """The surroundings of a training: whether other hosts take part (`hosts`), and the environment if processes may
    have been started by a launcher of others.
    """

    hosts: bool = False
    environ: Mapping[str, str] | None = None


ALONE = LaunchContext()
# What a launch imports after the trials of a user's code, in pieces of at most 0.1 s.
_OF_LAUNCH = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "dslc.runtime.loop.evaluate",
    "dslc.runtime.step.assemble",
    "dslc.runtime.checkpoint.checkpoint",
    "dslc.runtime.train",
    "dslc.runtime.launch",
)
_LONGEST_NAME = 200  # bytes of the name of a sub-folder: file systems have 255, and what is beside it gets endings
MOST_TRACED = 16  # ranks that a trace records: each is some MiB, and a browser opens the file


def prepare(
    loaded: LoadResult,
    report: Report,
    *,
    profile: bool = False,
    trace: bool = False,
    around: LaunchContext = ALONE,
) -> Ready | None:
    """Compiles a job for this machine; returns None with the reasons in the report, where warnings that block a run are
    errors. `profile`: the run records its memory and its collectives; `trace`: the times of some steps.
    """
    import_while_children_work(*_OF_LAUNCH)
    counts = inspect_for_run(loaded, report, run=True)
    elastic = loaded.job is not None and isinstance(loaded.job.devices.nodes, Range)
    if loaded.job is not None and elastic and counts and around.environ is not None:
        counts = counts_there(loaded.job, counts, around.environ, report)
    if not counts:
        return None
    analysis = counts[max(counts)]
    world = detect_launcher(analysis, report, around, elastic=elastic)
    if report.errors:
        return None
    ready = place_ranks(with_choice(loaded, analysis), compile_plan(analysis), TrainMode(profile=profile, trace=trace))
    return dataclasses.replace(ready, world=world, counts=counts if elastic and world is None else {})


def check_batches(ready: Ready, report: Report, answers: dict[str, ChildAnswer] | None = None) -> None:
    """Reports a training whose fullest micro-batch does not fit. Of several processes of a launcher only those check it
    that speak. `answers` is passed from one combination of a sweep to the next.
    """
    if ready.world is None or ready.world.speaks:
        analysis = ready.compiled.analysis
        check_worst_batches(ready.counts or {analysis.layout.nodes: analysis}, report, answers)


def place_ranks(loaded: LoadResult, compiled: Compiled, mode: Mode) -> Ready:
    """Returns a planned job with the program and the places of its ranks."""
    places = compiled.places()
    if isinstance(mode, TrainMode) and mode.trace:
        mode = dataclasses.replace(mode, traced=traced_ranks(places))
    program = dataclasses.replace(compiled.program(), mode=mode)
    return Ready(loaded=loaded, compiled=compiled, program=program, places=places)


def traced_ranks(places: Sequence[RankPlace]) -> tuple[int, ...]:
    """Returns the ranks that a trace records, at most `MOST_TRACED`: ranks of the first data replica before others, and
    of these the first of each pipeline coordinate. () stands for all.
    """
    if len(places) <= MOST_TRACED:
        return ()

    def order(place: RankPlace) -> tuple[int, ...]:
        return tuple(place.coordinates.get(axis, 0) for axis in ("data", "context", "tensor", "pipeline"))

    return tuple(sorted(place.rank for place in sorted(places, key=order)[:MOST_TRACED]))


def detect_launcher(
    analysis: Analysis, report: Report, around: LaunchContext, *, elastic: bool = False
) -> World | None:
    """Returns the place of this process, if the job's launcher has started it. Reports an environment that contradicts
    the job. Reports a job of several nodes that would run on one node, and a job of one node whose hosts would meet.
    """
    nodes, job = analysis.layout.nodes, analysis.job
    by_ssh = isinstance(job.launch.with_, SSH) and around.environ is not None and not around.hosts
    if not by_ssh:  # whose ranks are on other hosts
        check_needs(job, analysis.layout, os.environ, report)
    if around.environ is not None:
        world, errors = None, len(report.errors)
        world = world_for(job, analysis.layout, around.environ, report, hosts=around.hosts, elastic=elastic)
        if world is not None or len(report.errors) > errors:
            return world
    if nodes == 1 and around.hosts and not elastic:
        report.add(
            "E0807",
            "hosts are to meet, and the job takes one node",
            job.devices.value_span("nodes"),
            help="`devices.nodes` is their number; or leave out `--rendezvous` and DSLC_RENDEZVOUS",
        )
    elif (nodes > 1 or elastic) and not around.hosts and not by_ssh:
        counts = analysis.layout.node_counts
        takes = plural(nodes, "node") if len(counts) == 1 else f"{counts[0]} to {nodes} nodes"
        report.add(
            "E0807",
            f"the job takes {takes}, and this command runs on one",
            job.devices.value_span("nodes"),
            help=f"`dslc run {job.source.name} --rendezvous HOST` on each of them trains, where HOST is the name or "
            "address of one; `--set devices.nodes=1` is for one machine",
        )
    return None


def job_text(ready: Ready) -> str:
    """Returns the job as resolved: running it again is the same run."""
    assert ready.loaded.job is not None
    return write(anchored(ready.loaded.job))


def write_run_directory(ready: Ready, folder: str) -> None:
    """Writes the files known before the start: the job as resolved, the plan, the program."""
    assert ready.loaded.job is not None
    os.makedirs(os.path.join(folder, "logs"), exist_ok=True)
    plan = file_of(ready.compiled, ready.loaded)
    plan = dataclasses.replace(plan, folder=os.path.relpath(ready.loaded.job.folder, folder))
    for name, text in (
        ("job.plt", job_text(ready)),
        ("plan.json", plan.text()),
    ):
        path = os.path.join(folder, name)
        with replacing(path) as file:
            file.write(text)
    write_program(folder, ready.program, ready.places)


def train(
    ready: Ready,
    folder: str,
    launch: Callable[[JobProgram, tuple[RankPlace, ...], str], Outcome],
    *,
    goes_on: bool = False,
) -> tuple[Outcome, RunReport | None]:
    """Trains in a folder, from its claim to its report: writes the files, launches, and draws the plan meanwhile.

    Returns the outcome and the contents of report.json; None if the training failed, or was ended at once and left no
    records. `goes_on`: it is the folder of this training already. Raises FolderInUseError.
    """
    with claim_folder(folder, ready.program, goes_on=goes_on):
        write_run_directory(ready, folder)
        begin(folder, ready.program.steps)
        with feed(ready, folder):
            with draw_plan(ready.compiled.plan, folder):
                outcome = launch(ready.program, ready.places, folder)
            cut_off = outcome.failure is not None or outcome.stopped_at == 0
            return outcome, None if cut_off else report_on(ready, folder, outcome.steps)


def launch(
    program: JobProgram,
    places: tuple[RankPlace, ...],
    folder: str,
    *,
    quiet: bool = False,
    screen: TextIO | None = None,
    **more: Any,
) -> Outcome:
    """Launches ranks from this process, with progress on `screen` if it is given, and without if `quiet`; `more` as
    runtime/launch.py has it. torch is imported only now, when the folder is known to be free.
    """
    from dslc.runtime.launch import launch

    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        return launch(program, places, folder, screen=nowhere if quiet and screen is None else screen, **more)


def launch_quietly(
    program: JobProgram, places: tuple[RankPlace, ...], folder: str, screen: TextIO | None = None
) -> Outcome:
    """Launches ranks with progress on `screen` alone. Raises KeyboardInterrupt if they are stopped."""
    outcome = launch(program, places, folder, quiet=True, screen=screen)
    if outcome.stopped_at is not None:
        raise KeyboardInterrupt
    return outcome


def show_failure(outcome: Outcome, *, what: str = "training", before: str = "") -> None:
    """Shows how ranks failed, after the words `before`; `what` they were launched for."""
    from dslc.runtime.process.failure import describe

    said = describe(outcome).replace("training failed", f"{what} failed", 1)
    print(plain_lines(f"{before}{said}".expandtabs()), file=sys.stderr)


def feed(ready: Ready, folder: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which the loggers of libraries that the job names receive the records and files of a run."""
    assert ready.loaded.job is not None
    return feed_loggers(ready.loaded.job, ready.program.checkpoint, folder)


def report_on(ready: Ready, folder: str, steps: int) -> RunReport:
    """Writes report.json of a run that was not cut off, and returns its contents."""
    from dslc.runtime.measure.report import write_report

    return write_report(folder, ready.compiled.plan, ready.program, steps)


def folders_of(loaded: LoadResult, combinations: Sequence[LoadResult], folder: str) -> list[tuple[str, LoadResult]]:
    """Returns a sub-folder for each combination of a sweep, named by its values."""
    if len(combinations) == 1 and combinations[0] is loaded:
        return [(folder, loaded)]
    named = []
    for settings, chosen in zip(loaded.combinations, combinations, strict=True):
        words = ",".join(f"{path.rsplit('.', 1)[-1]}={text}" for path, text in settings)
        named.append((os.path.join(folder, _file_name(words)), chosen))
    return named


def _file_name(words: str) -> str:
    """Returns the name of a sub-folder. One that is too long for a file system ends in a digest of the whole."""
    name = words.replace(os.sep, "_").replace('"', "")
    content = name.encode()
    if len(content) <= _LONGEST_NAME:
        return name
    digest = hashlib.blake2b(content, digest_size=8).hexdigest()
    return f"{content[: _LONGEST_NAME - len(digest) - 1].decode(errors='ignore')}-{digest}"
