"""Compares who is to start a job's processes with who has started this one, by its environment.

Model: launchers leave variables in the environment of each process that they start (runtime/launchers). The processes
of one launcher all find the same here; one of them says it (`World.speaks`).
"""

from __future__ import annotations

from collections.abc import Mapping

from dslc.compiler.placement.layout import Layout
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Note, Report
from dslc.dsl.language.job import JobSpec
from dslc.dsl.words import either, plural
from dslc.runtime.launchers.detect import LAUNCHERS, worlds
from dslc.runtime.launchers.world import World

NOT_STARTED = "E0809"  # which all processes of a launcher find alike
_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
_TO = {"torchrun": ":"}  # between the ends of a range of nodes, where it is not `-`
_ALONE = {"RANK": "0", "WORLD_SIZE": "1"}  # what torch's own processes are given, and what one alone has


def world_for(
    job: JobSpec,
    layout: Layout,
    environ: Mapping[str, str],
    report: Report,
    *,
    hosts: bool = False,
    elastic: bool = False,
) -> World | None:
    """Returns the place of this process, if the launcher of the job has started it, and reports an environment that
    contradicts the job. `hosts`: it was said where the processes of several hosts meet; `elastic`: they may come and
    go. Both are so in the pods of an elastic job, which have no place: each is a host that comes to the others.
    """
    word, found = job.launch.with_.word, worlds(environ)
    if word not in LAUNCHERS:
        if not hosts:
            _not_asked(job, found, environ, report)
    elif hosts and elastic and in_pod(word, environ):
        return None
    elif word not in found:
        _not_started(job, layout, found, environ, report)
    else:
        why = _contradiction(layout, found[word]) or _other_restarts(job, environ)
        if why:
            report.add("E0810", why, job.launch.value_span("with_"), help=f"`{_command(job, layout)}`")
        return found[word]
    return None


def in_pod(word: str, environ: Mapping[str, str]) -> bool:
    """True if Kubernetes, which a job names by this word, has started this process."""
    return word == "kubernetes" and LAUNCHERS[word].sign in environ


def counts_there(
    job: JobSpec, counts: Mapping[int, Analysis], environ: Mapping[str, str], report: Report
) -> Mapping[int, Analysis]:
    """Returns the analysis of the count of nodes on which the launcher of an elastic job has started its processes. It
    is empty if the job does not train on that count. If the launcher has not started the job, it has all counts.
    """
    world = worlds(environ).get(job.launch.with_.word)
    if world is None or world.fault:
        return counts
    layout = counts[max(counts)].layout
    nodes = world.nodes if world.nodes is not None else world.size // (layout.world_size // layout.nodes)
    if nodes in counts:
        return {nodes: counts[nodes]}
    if not nodes:  # fewer processes than one node has ranks, which will be said
        return counts
    report.add(
        "E0810",
        f"{world.command} has started processes on {plural(nodes, 'node')}, and the job trains on "
        f"{either(sorted(counts))}",
        job.launch.value_span("with_"),
        notes=[Note(message="the range is here", span=job.devices.value_span("nodes"))],
        help=f"`{_command(job, layout)}`",
    )
    return {}


def _contradiction(layout: Layout, world: World) -> str:
    names, ranks, each = world.names, layout.world_size, layout.world_size // layout.nodes
    if world.fault:
        return _describe_start(world)
    if world.nodes is not None and world.nodes != layout.nodes:
        return (
            f"{world.command} has started this process as one on {plural(world.nodes, 'node')} ({names['nodes']} is "
            f"{world.nodes}), and the job takes {each} on {_nodes(layout)}"
        )
    if world.of_nodes and world.size == layout.nodes:
        return ""
    if world.size != ranks:
        return f"{_describe_start(world)}, and the job takes {plural(ranks, 'rank')}: {each} on {_nodes(layout)}"
    if world.local_size is not None and world.local_size != each:
        return (
            f"{names['local_size']} is {world.local_size}: {world.command} has started as many processes on this host, "
            f"and the job takes {each} on {_nodes(layout)}"
        )
    if world.local_rank is not None and world.local_rank != world.rank % each:
        return (
            f"{names['rank']} is {world.rank} and {names['local_rank']} is {world.local_rank}, and the job has ranks "
            f"{world.rank // each * each} to {world.rank // each * each + each - 1} on one host, in this order"
        )
    return ""


def _other_restarts(job: JobSpec, environ: Mapping[str, str]) -> str:
    """Returns how torchrun restarts otherwise than the job says; "" if it does not."""
    asked, told = job.launch.restarts, environ.get(_RESTARTS, "")
    if job.launch.with_.word != "torchrun" or not asked or told == str(asked):
        return ""
    said = f"{_RESTARTS} is {told}" if told else f"{_RESTARTS} is not set"
    return f"torchrun starts failed processes again, {said}, and the job says `restarts = {asked}`"


def _nodes(layout: Layout) -> str:
    return f"each of {layout.nodes} nodes" if layout.nodes > 1 else "one node"


def _not_started(
    job: JobSpec, layout: Layout, found: Mapping[str, World], environ: Mapping[str, str], report: Report
) -> None:
    word = job.launch.with_.word
    other = next(iter(found.values()), None)
    missing = f"it has not started this process: {LAUNCHERS[word].sign} is not set"
    if in_pod(word, environ):
        missing = "this pod is not one that `dslc submit` has made of this job"
    instead = missing if other is None else _describe_start(other)
    report.add(
        NOT_STARTED,
        f"the job says `{word}()`, and {instead}",
        job.launch.value_span("with_"),
        help=f"`{_command(job, layout)}`; or `--set launch.with=local()`",
    )


def _not_asked(job: JobSpec, found: Mapping[str, World], environ: Mapping[str, str], report: Report) -> None:
    """Reports a job that starts its own processes, in a process that is one of several, or looks like one."""
    word = job.launch.with_.word
    other = next((world for world in found.values() if world.size > 1 or world.fault), None)
    if other is not None:
        report.add(
            NOT_STARTED,
            f"the job says `{word}()`, and {_describe_start(other)}, each of which would train all of it",
            job.launch.value_span("with_"),
            help=f"`--set launch.with={other.word}()`, or the command without {other.command}, once",
        )
        return
    stale = [f"{name} is {environ[name]}" for name, alone in _ALONE.items() if environ.get(name, "") not in ("", alone)]
    if stale and not found:
        report.add(
            NOT_STARTED,
            f"the job says `{word}()`, which starts all processes, and the environment says that this is one of "
            f"several: {' and '.join(stale)}",
            job.launch.value_span("with_"),
            help=f"`unset {' '.join(name for name in _ALONE if name in environ)}`; or `launch.with = torchrun()` with "
            "torchrun's command",
        )


def _describe_start(world: World) -> str:
    if world.fault:
        return f"{world.command} has started this process, whose {world.fault}"
    name = world.names["size"]
    return f"{world.command} has started {plural(world.size, 'process')} ({name} is {world.size})"


def command(word: str, layout: Layout, job: str, restarts: int = 0) -> list[str]:
    """Returns the launcher's command that starts the processes of a job, and starts failed processes again."""
    if word == "kubernetes":
        return ["dslc", "submit", job]
    each = layout.world_size // layout.nodes
    counts = layout.node_counts
    nodes = str(layout.nodes) if len(counts) == 1 else f"{counts[0]}{_TO.get(word, '-')}{counts[-1]}"
    numbers = {"nodes": nodes, "processes": each, "ranks": layout.world_size}
    words = LAUNCHERS[word].start.format(**numbers).split()
    if word == "torchrun" and restarts:
        words[-1:] = ["--max-restarts", str(restarts), words[-1]]
    return [*words, "dslc", "run", job]


def _command(job: JobSpec, layout: Layout) -> str:
    return " ".join(command(job.launch.with_.word, layout, job.source.name, job.launch.restarts))
