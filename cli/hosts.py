"""Trains on several hosts: each runs the same command, and this is one of them.

Model: every host compiles the job by itself. The launchers meet (runtime/hosts/company.py) and compare what each knows
of the job: versions, the texts of the job, the modules and the data that it names, the plan, GPUs. The keeper's run
directory has everything; a host that sees the same folder writes the logs of its ranks there, another one into a run
directory of its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dslc.compiler.plan_facts import facts_of
from dslc.dsl.language.job import python_calls
from dslc.dsl.plain import plain
from dslc.run_folder import make_folder
from dslc.runs import Ready, launch, train
from dslc.version import __version__

if TYPE_CHECKING:
    from dslc.runtime.hosts.company import Company
    from dslc.runtime.process.failure import Outcome

_ANSWER = 60.0  # seconds that a host may take to answer about a folder


def train_on_hosts(ready: Ready, rendezvous: str, out: str | None) -> tuple[Outcome, dict[str, Any] | None, str]:
    """Trains with the hosts that come to the rendezvous; returns the outcome, the report (on the keeper) and the run
    directory. Raises NotMet, and Occupied.
    """
    from dslc.runtime.hosts.company import Meeting, meet

    meeting = Meeting(
        rendezvous=rendezvous,
        nodes=ready.compiled.plan.topology.nodes,
        facts=dict(_facts(ready)),
        timeout=ready.program.timeout,
        say=lambda text: print(plain(text), file=sys.stderr, flush=True),
    )
    company = meet(meeting)
    try:
        return _train(ready, company, out)
    finally:
        company.close()


def _train(ready: Ready, company: Company, out: str | None) -> tuple[Outcome, dict[str, Any] | None, str]:
    from dslc.runtime.hosts.company import shared

    folder, blind = shared(company, make_folder(ready.program, out) if company.keeps else "", _ANSWER)
    _share_checkpoints(ready, company, folder)
    own = partial(launch, company=company)
    if company.keeps:
        return *train(ready, folder, own), folder
    if company.host in blind:
        folder = make_folder(ready.program, out)
    return own(ready.program, ready.places, folder), None, folder


def _share_checkpoints(ready: Ready, company: Company, folder: str) -> None:
    """Raises NotMet, on all hosts, if one does not see the folder of the checkpoints."""
    from dslc.runtime.checkpoint.files import folder_of
    from dslc.runtime.hosts.company import NotMet, shared

    if not ready.program.checkpoint.written:
        return
    place = folder_of(ready.program, folder)
    if company.keeps:
        os.makedirs(place, exist_ok=True)
    _, blind = shared(company, place, _ANSWER)
    if blind:
        does = "do not see" if len(blind) > 1 else "does not see"
        raise NotMet(
            f"{' and '.join(blind)} {does} {place} of {company.hosts[0]}: checkpoints need a folder that all hosts "
            "share, which `checkpoint.dir` or --out names"
        )


def _facts(ready: Ready) -> Iterator[tuple[str, str]]:
    """Yields what the hosts have to have alike, the causes before what follows from them."""
    analysis = ready.compiled.analysis
    yield "the version of dslc", __version__
    yield "the version of torch", version("torch")
    yield "the version of Python", platform.python_version()
    for name, text in ready.loaded.texts.items():
        yield f"the file {name}", _digest(text.encode())
    for call in python_calls(analysis.job):
        module = call.function.partition(":")[0]
        path = os.path.join(analysis.job.folder, *module.split(".")) + ".py"
        if os.path.isfile(path):
            with open(path, "rb") as file:
                yield f"the file {os.path.relpath(path, analysis.job.folder)}", _digest(file.read())
    for fact in facts_of(analysis).files:
        yield f"the file {fact.path}", f"{fact.size:,} bytes, {fact.digest[:8]}"
    machine = analysis.facts.machine
    if analysis.layout.device == "cuda" and machine is not None:
        yield "the GPUs", ", ".join(f"{size / 2**30:.0f} GiB" for size in machine.gpus) or "none"
    yield "the plan", ready.program.plan_hash


def _digest(content: bytes) -> str:
    return f"{len(content):,} bytes, {hashlib.sha256(content).hexdigest()[:8]}"
