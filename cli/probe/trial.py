"""The argument of each probe: the job, the facts that are known so far, and the steps that follow from them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dslc.compiler.ir.facts import Facts, SourceFacts
from dslc.compiler.ir.steps import PythonFunction
from dslc.compiler.model.job_steps import JobSteps, job_steps, locate_paths, python_function
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.job import JobSpec
from dslc.dsl.source import Span
from dslc.probe.sample_outputs import TrialBatches

if TYPE_CHECKING:
    from dslc.probe.trial_cache import TrialCache


class Files:
    """Files in which the children that run a user's code pass on batches. The source's batches are pairs (input,
    target); the network's outputs for them are pairs (output, target).
    """

    def __init__(self, folder: str) -> None:
        self.batches, self.outputs = os.path.join(folder, "batches.pt"), os.path.join(folder, "outputs.pt")
        self.samples = os.path.join(folder, "samples.pt")  # a batch of different samples
        self.sample_outputs = os.path.join(folder, "sample_outputs.pt")  # of the network, for some samples


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The job of a probe and its facts so far. `sound`: no probe has yielded an error so far. `run`: the ranks are
    forked from this process later. `batches` are what a user's loss and metrics are tried with. `longest` is the sample
    of the source that batches are traced with; None: the largest of the first. `cache` collects what facts rest on that
    no child found.
    """

    job: JobSpec
    facts: Facts
    files: Files
    sound: bool = True
    run: bool = False
    longest: int | None = None
    batches: TrialBatches = field(default_factory=TrialBatches)
    cache: TrialCache | None = None

    @property
    def source(self) -> SourceFacts:
        assert self.facts.source is not None
        return self.facts.source

    @cached_property
    def steps(self) -> JobSteps:
        return job_steps(self.job, self.source, self.batches.output)

    def function(self, call: PythonCall) -> PythonFunction:
        return locate_paths(python_function(call), self.job.folder)

    def with_facts(self, **facts: Any) -> Trial:
        return replace(self, facts=replace(self.facts, **facts))


def missing_library(name: str, span: Span | None) -> Diagnostic:
    return Diagnostic("E0803", f"the library `{name}` is not installed", span, help=f"`pip install 'dslc[{name}]'`")
