"""Keeps what the trials of a job's own code told, in the user's cache, for the next time that everything is the same.

Model: one entry holds the facts of all trials of a job (`trace_facts`), if none of them had anything to report. Its
name is a digest of the whole job, of what its data told without trials, and of the current folder. Files of weights and
the network's configuration count too, as no child looks for them, and all that trace_cache.py names: versions, dslc's
own code, modules in reach, settings of libraries. The entry lists the files, folders and variables that any of the
trials looked at (dependency_recorder.py). It is taken only if files have the same content, folders the same names and
variables the same values. A hit forks nothing and imports no torch.

Contract: cached facts equal the facts that trials would find. A job without a user's code has no entry. All trials are
done each time if one of them prints, warns, fails, starts a process, writes a file, opens a connection or leaves
anything running; if a function of the job is an object of a program, or a module of the user's is loaded already; or if
a compiled library was loaded that may open files unseen by Python. `DSLC_TRACE_CACHE=off` in the environment switches
it off.

Limits: what dependency_recorder.py does not see.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from dslc.compiler.facts.transformers_file import configuration_file
from dslc.compiler.facts.weights_file import Unreadable, files_of
from dslc.compiler.ir.codec import to_json
from dslc.compiler.ir.facts import Facts, SourceFacts, TensorEntry
from dslc.compiler.ir.module_facts import ModelFacts
from dslc.compiler.ir.network_facts import NetworkFacts, OptimizerFacts
from dslc.dsl.language.job import JobSpec, python_calls
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.language.metrics import TorchMetric
from dslc.dsl.record import Record, record
from dslc.probe.child import ChildAnswer
from dslc.probe.dependency_recorder import Dependencies, DependencyRecorder, combine, digest_of, users_modules
from dslc.probe.trace_cache import CacheEntry
from dslc.runtime.process.user_code import HANDED_OVER


@record
class TrialFacts(Record):
    """The facts that trials add or change: all of `Facts` but the machine's."""

    source: SourceFacts | None
    model: ModelFacts | None
    made: ModelFacts | None
    optimizer: OptimizerFacts | None
    weights: Mapping[str, TensorEntry] | None
    step_draws: NetworkFacts | None = None
    loss_draws: NetworkFacts | None = None


class TrialCache:
    """The entry of one job's trials, and what the trials have looked at so far: a watch of all children."""

    def __init__(self, job: JobSpec, source: SourceFacts, folder: str, *, run: bool) -> None:
        """`folder` is where trials write their own files. Before a `run` a library of metrics is tried, too."""
        modules = {call.function.partition(":")[0] for call in python_calls(job)}
        is_kept = bool(modules) and modules.isdisjoint(HANDED_OVER) and not any(users_modules())
        key: dict[str, object] = {"trials of": repr(job), "source": to_json(source), "current folder": os.getcwd()}
        key["torchmetrics"] = run and any(isinstance(metric, TorchMetric) for metric in job.evaluate.metrics)
        key |= {"weights": _weight_files(job), "configuration": _configuration(job)}
        self._entry = CacheEntry(TrialFacts, key if is_kept else None, job.folder)
        self._folder = folder
        self._dependencies: Dependencies = {"files": {}, "folders": {}, "environment": {}}
        self._complete = True

    def load(self) -> Facts | None:
        """Returns the facts, if they were kept and everything that they rest on is the same."""
        loaded = self._entry.load()
        return Facts(**_fields(loaded[0])) if loaded else None

    def store(self, facts: Facts) -> None:
        """Keeps the facts of trials that had nothing to report, if all that they looked at is known."""
        if self._complete:
            trial_fields = {name: value for name, value in _fields(facts).items() if name in TrialFacts.record_names}
            self._entry.store(to_json(TrialFacts(**trial_fields)), self._dependencies)

    def add(self, dependencies: Dependencies) -> None:
        """Adds what facts rest on."""
        combined = combine(self._dependencies, dependencies)
        self._complete &= combined is not None
        self._dependencies = combined or self._dependencies

    def wrap(self, work: Callable[[], object]) -> Callable[[], object]:
        """Returns work for a child that does `work`, and reports what it looked at."""
        pid = os.getpid()

        def run_watched() -> object:
            if os.getpid() == pid:  # a process that goes on cannot be watched
                return {"result": work(), "dependencies": None}
            _seed_generators()
            recorder = DependencyRecorder(self._folder, reads_data=True)
            result = work()
            return {"result": result, "dependencies": recorder.dependencies()}

        return run_watched if self._entry.has_place else work

    def unwrap(self, answer: ChildAnswer) -> ChildAnswer:
        """Returns the answer to the work itself, of a child that did what `wrap` returned."""
        if not self._entry.has_place:
            return answer
        if "made" not in answer:
            self._complete = False
            return answer
        dependencies: Dependencies | None = answer["made"]["dependencies"]
        if dependencies is None or answer.get("left"):
            self._complete = False
        else:
            self.add(dependencies)
        work_answer: ChildAnswer = {**answer, "made": answer["made"]["result"]}
        return work_answer


def _fields(facts: Facts | TrialFacts) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in fields(facts)}


def _seed_generators() -> None:
    """Makes draws of this child the same each time."""
    import random

    import numpy

    random.seed(0)
    numpy.random.seed(0)


def _weight_files(job: JobSpec) -> object:
    """Returns names, sizes and times of the files that `model.weights` names, or why there are none."""
    start = job.model.start
    if start is None or not start.path:
        return None
    try:
        weights = files_of(start.path)
        states = [(file, os.stat(file)) for file in (*weights.files, weights.path)]
    except (Unreadable, OSError) as error:
        return str(error)
    return [(file, state.st_size, state.st_mtime_ns) for file, state in states]


def _configuration(job: JobSpec) -> str | None:
    """Returns the digest of the file that a network of `transformers` is built from, "" if there is none."""
    network = job.model.network
    file = configuration_file(network, job.folder) if isinstance(network, TransformersNetwork) else None
    return file and digest_of(file)
