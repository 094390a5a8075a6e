"""Writes the job that a configuration is proved with: for CPUs of this machine, in fp32, with few data ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from dslc.conversion.batch_size import BatchSize
from dslc.conversion.draft import Draft
from dslc.conversion.job_text import job_text

RANKS = 2
MOST = 8  # samples of a micro-batch, and micro-batches of a step
VOCAB, CONTEXT = 128, 32
# Settings that the proof leaves out, each with what happens in their place.
_LEFT_OUT = {
    "train.precision": "",  # the tool's runner says it, and the next
    "train.compile": "",
    "memory.offload": "nothing is offloaded: all memory is the host's here",
    "model.adapter": "all parameters train",
    "parallelism.schedule": "",
    "parallelism.replicas": "one copy of the shards",
    "data.validation": "",
    "data.workers": "",
    "data.last_batch": "",
}


@dataclass(frozen=True)
class ProofSizes:
    """The sizes of the training on this machine, and what differs from the configuration, in words."""

    micro: int
    accumulation: int
    ranks: int
    changes: tuple[str, ...]

    @property
    def batch(self) -> int:
        return self.micro * self.accumulation * self.ranks


def default_base(batch: int, samples: int, schedule: str) -> str:
    """Returns a job with a small network and synthetic data, for a configuration that names neither. `schedule` is one
    of the user's program, where the tool leaves it to that.
    """
    return f"""model {{
  network = gpt(layers = 2, width = 64, heads = 4, context = {CONTEXT}, vocab = {VOCAB})
  loss    = cross_entropy()
}}

data {{
  source = synthetic(samples = {samples}, vocab = {VOCAB})
  batch  = {batch}
}}

train {{
  epochs    = 1
  optimizer = adamw(lr = 1e-3)
{schedule}}}
"""


def proof_draft(draft: Draft) -> tuple[Draft, ProofSizes]:
    """Returns the draft of the job for this machine, and its sizes."""
    small, changes = replace(draft, settings=dict(draft.settings)), []
    for path, reason in _LEFT_OUT.items():
        setting = small.settings.pop(path, None)
        if setting is not None and reason:
            changes.append(f"{path} = {setting.text}: {reason}")
    for axis, size in draft.axes.items():
        small.settings.pop(f"parallelism.{axis}", None)
        changes.append(f"parallelism.{axis} = {size}: the ranks share the samples out")
    batch = draft.batch
    ranks = min(batch.ranks or RANKS, RANKS)
    micro, accumulation = _shares(batch, ranks)
    for name, before, after in (
        ("data ranks", batch.ranks, ranks),
        ("micro-batch", batch.micro, micro),
        ("accumulation", batch.accumulation, accumulation),
    ):
        if before is not None and before != after:
            changes.append(f"{name} {before} -> {after}")
    small.batch = BatchSize(micro, accumulation, None, ranks).resolved()
    small.devices, small.axes, small.wants_cpu = (1, ranks), {}, True
    return small, ProofSizes(micro, accumulation, ranks, tuple(changes))


def _shares(batch: BatchSize, ranks: int) -> tuple[int, int]:
    """Returns a micro-batch and a number of micro-batches that this machine can train."""
    accumulation = batch.accumulation or 1
    micro = batch.micro or (max(1, batch.total // (accumulation * ranks)) if batch.total else 4)
    if batch.accumulation is None and batch.total and batch.micro:
        accumulation = max(1, batch.total // (micro * ranks))
    return min(micro, MOST), min(accumulation, MOST)


def steps_per_epoch(draft: Draft, steps: int) -> int:
    """Returns the steps of an epoch on synthetic data: `steps` are most of a training, whose warm-up fits it."""
    if "train.steps" in draft.settings:
        return steps
    epochs = _epochs(draft)
    warmup = re.fullmatch(r"(\d+) steps?", draft.schedule.arguments.get("warmup", "")) if draft.schedule else None
    return max(1, steps // epochs, -(-2 * int(warmup[1]) // epochs) if warmup else 0)


def _epochs(draft: Draft) -> int:
    stated = draft.settings.get("train.epochs")
    return int(stated.text) if stated is not None and stated.text.isdigit() else 1


def with_base(draft: Draft, base: str) -> str:
    """Returns the text of the job, with network and data of the job at the path `base`."""
    return job_text(draft, "the job of a proof", base=base)
