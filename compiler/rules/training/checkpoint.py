"""The rules of checkpoints: the contents of the folders that a job names.

They look at names alone, which this machine may have or not: `check` warns, `run` refuses. Whether a checkpoint is
undamaged and fits is found when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from dslc.compiler.facts.checkpoint_names import MANIFEST, checkpoint_folder, names_in
from dslc.dsl.diagnostics import Diagnostic
from dslc.dsl.language.calls import Slurm
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, remove_field, set_field


def check_checkpoints(job: JobSpec) -> Iterator[Diagnostic]:
    """Checks the folder that is written to, the checkpoint that is resumed from, and that restarts have one."""
    checkpoint = job.checkpoint
    if checkpoint.resume is None and checkpoint.dir is not None and checkpoint.is_enabled:
        there = _checkpoints_in(checkpoint.dir)
        if there:
            yield Diagnostic(
                "W0811",
                f"{checkpoint.dir} holds checkpoints already",
                checkpoint.value_span("dir"),
                label=f"the newest is {there[-1]}",
                help=remedy(
                    set_field("checkpoint.resume", "auto"),
                    " continues from them; otherwise name another folder, or remove them",
                ),
            )
    if checkpoint.resume not in (None, "auto"):
        missing = _missing(checkpoint.resume)
        if missing:
            yield Diagnostic(
                "W0812",
                f"there is no checkpoint to resume from: {missing}",
                checkpoint.value_span("resume"),
                help="a checkpoint (`step-00000050`), a folder that holds some, a run directory, or `auto`",
            )
    call = job.launch.with_
    if isinstance(call, Slurm) and call.time is not None and not checkpoint.is_enabled:
        yield Diagnostic(
            "W0815",
            "SLURM ends the job at its time limit, and the training writes no checkpoint to go on from",
            call.value_span("time"),
            help="`checkpoint { every = … }`: it is warned before the limit, writes one, and goes on",
        )
    if job.launch.restarts and not checkpoint.is_enabled:
        yield Diagnostic(
            "E0808",
            "a restart goes on from the last checkpoint, and the training writes none",
            job.launch.value_span("restarts"),
            help=remedy("`checkpoint { every = … }`, or ", remove_field("launch.restarts")),
        )


def _missing(path: str) -> str:
    if not os.path.exists(path):
        return f"{path} does not exist"
    if not os.path.isdir(path):
        return f"{path} is not a folder"
    folder = checkpoint_folder(path)
    if not os.path.exists(os.path.join(folder, MANIFEST)) and not _checkpoints_in(folder):
        return f"{path} holds none"
    return ""


def _checkpoints_in(folder: str) -> list[str]:
    try:
        return names_in(folder)
    except OSError:
        return []
