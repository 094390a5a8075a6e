"""`dslc check --resume`: checks that a job would resume from a checkpoint, without torch and without a process.

Model: the newest checkpoint in a folder that is whole (every file is read) and fits is taken, as in a training. Faults
of newer checkpoints are then warnings. If none fits, each reason why the newest whole one does not is an error at the
job's field.

Limits: facts that the compiler does not know (a `python(…)` model that was not traced, data that is not here) are not
compared. A warning says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dslc.compiler.facts.checkpoint_names import checkpoint_folder
from dslc.compiler.graph.constants import data_step, optimizer_step
from dslc.compiler.ir.number_text import path_text
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Note, Report
from dslc.dsl.language.optimizers import PythonOptimizer
from dslc.dsl.source import Span
from dslc.dsl.words import plural
from dslc.probe.unchecked_parts import uncompared_parts
from dslc.runs.checkpoints import tensors_of
from dslc.runtime.checkpoint.files import (
    Manifest,
    checkpoints_in,
    damage,
    look,
    misfitting_tensors,
    same_state,
    value_text,
)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    path: str
    manifest: Manifest | None
    damage: str
    misfits: tuple[Diagnostic, ...] = ()


def check_resume(analysis: Analysis, place: str, report: Report) -> str:
    """Reports why the job cannot resume from `place`; or returns the checkpoint from which it resumes, in words."""
    paths = _paths(place)
    job = analysis.job
    if not paths:
        report.add(
            "E0901",
            f"there is no checkpoint in {place}",
            job.checkpoint.value_span("resume"),
            help="a checkpoint (`step-00000050`), a folder that holds some, or a run directory",
        )
        return ""
    seen: list[_Candidate] = []
    for path in paths:
        found = _candidate(path, analysis)
        if not found.damage and not found.misfits:
            report.extend(each.as_warning() for other in seen for each in _reasons(other, analysis))
            assert found.manifest is not None
            report.extend(uncompared_parts(analysis, path_text(path)))
            return f"it would resume after step {found.manifest.step:,}, from {path_text(path)}"
        seen.append(found)
    whole = [each for each in seen if not each.damage]
    for each in whole[:1] or seen:
        report.extend(_reasons(each, analysis))
    return ""


def _paths(place: str) -> list[str]:
    return checkpoints_in(checkpoint_folder(os.path.expanduser(place)))


def _candidate(path: str, analysis: Analysis) -> _Candidate:
    seen = look(path)
    if seen.manifest is None:
        return _Candidate(path=path, manifest=None, damage=seen.reason)
    misfits = tuple(_incompatibilities(path, seen.manifest, analysis))
    wrong = [] if misfits else damage(path, seen.manifest)
    return _Candidate(path=path, manifest=seen.manifest, damage="; ".join(wrong), misfits=misfits)


def _reasons(candidate: _Candidate, analysis: Analysis) -> Sequence[Diagnostic]:
    if not candidate.damage:
        return candidate.misfits
    return [
        Diagnostic(
            code="E0902",
            message=f"{path_text(candidate.path)} is damaged: {candidate.damage}",
            span=analysis.job.checkpoint.value_span("resume"),
            help="it cannot be repaired: resume from an older one, or copy it again from an intact copy",
        )
    ]


def _incompatibilities(path: str, manifest: Manifest, analysis: Analysis) -> Iterator[Diagnostic]:
    job, fit, workload, name = analysis.job, manifest.fit, analysis.workload, path_text(path)

    def wrong(code: str, what: str, span: Span | None, help: str, notes: Sequence[Note] = ()) -> Diagnostic:
        return Diagnostic(code=code, message=f"{name} does not fit: {what}", span=span, help=help, notes=tuple(notes))

    if analysis.model is not None and fit.tensors is not None:
        other = misfitting_tensors(fit.tensors, tensors_of(analysis.model, fit.tensors))
        if other:
            remedy = "the network that it was written with; `dslc export` and `model.weights` begin a new training"
            yield wrong("E0903", other, job.model.value_span("network"), remedy)
    optimizer = job.train.optimizer
    own = isinstance(optimizer, PythonOptimizer)
    if not own or analysis.facts.optimizer is not None:
        step = optimizer_step(analysis)
        if not same_state(step.kind, fit.optimizer):
            written = f'python("{fit.optimizer}", …)' if ":" in fit.optimizer else f"{fit.optimizer.lower()}(…)"
            kind = step.kind if own else optimizer.word
            what = f"its optimizer is {written.removesuffix('(…)')}, and the job's {kind}"
            yield wrong("E0904", what, job.train.value_span("optimizer"), f"`optimizer = {written}`")
        elif set(step.state) != set(fit.states):
            kept, wanted = (", ".join(states) or "nothing" for states in (fit.states, step.state))
            what = f"its optimizer keeps {kept} for each parameter, and the job's {wanted}"
            yield wrong("E0904", what, optimizer.span, "the arguments that decide it, as `momentum` and `amsgrad`")
    same: list[tuple[str, int | str, int | str | None, Span | None, str]] = [
        ("seed", fit.seed, job.train.seed, job.train.value_span("seed"), f"`train.seed = {fit.seed}`"),
        ("global batch", fit.batch, job.data.batch, job.data.value_span("batch"), f"`data.batch = {fit.batch}`"),
        (
            "shuffling",
            fit.shuffle,
            job.data.shuffle,
            job.data.value_span("shuffle"),
            f"`shuffle = {str(fit.shuffle).lower()}`",
        ),
        (
            "number of training samples",
            fit.train_samples,
            0 if workload.endless else workload.train,
            job.data.value_span("source"),
            "the same data, and the same `validation`",
        ),
    ]
    if workload.visited is not None and workload.train is not None:
        what, span = data_step(analysis).order, job.data.value_span("sampler" if job.data.sampler else "source")
        same.append(("order of samples", fit.order, what, span, "the same `sampler`, or the same mixture"))
    found = False
    for what, theirs, ours, span, help in same:
        if ours is not None and theirs != ours:
            found = True
            yield wrong("E0905", f"its {what} is {value_text(theirs)}, and the job's {value_text(ours)}", span, help)
    per_epoch = 0 if workload.endless else workload.steps_per_epoch
    if not found and per_epoch is not None and per_epoch != fit.steps_per_epoch:
        what = f"its epochs are of {plural(fit.steps_per_epoch, 'step')}, and the job's of {per_epoch:,}"
        yield wrong("E0905", what, job.data.value_span("last_batch"), "the same `last_batch`")
    if workload.steps is not None and manifest.step > workload.steps:
        span = job.train.value_span("epochs") if job.train.epochs is not None else job.train.value_span("steps")
        what = f"it is at step {manifest.step:,}, and the job ends after {workload.steps:,}"
        yield wrong("E0906", what, span, f"more than {plural(manifest.step, 'step')}, or an older checkpoint")
