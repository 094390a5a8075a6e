"""The plan file of a compiled job, as `dslc plan --json` prints it and a run directory holds it."""

from __future__ import annotations

import os

from dslc.compiler.compile import Compiled
from dslc.compiler.plan_facts import facts_of
from dslc.compiler.plan_file import JobText, PlanFile
from dslc.dsl.meaning.load import LoadResult
from dslc.terminal.version import __version__


def file_of(compiled: Compiled, loaded: LoadResult) -> PlanFile:
    """Returns the plan file of a job. The plan file of a sweep is of its first combination."""
    job, settings = compiled.analysis.job, list(loaded.settings)
    for combination in loaded.combinations[:1]:
        settings += [f"{path}={text}" for path, text in combination]
    source = JobText(
        files=tuple(loaded.texts.items()),
        settings=tuple(settings),
        beside=os.path.relpath(loaded.beside, job.folder) if settings else ".",
    )
    facts = facts_of(compiled.analysis)
    return PlanFile(graph=compiled.graph, source=source, facts=facts, dslc=__version__)
