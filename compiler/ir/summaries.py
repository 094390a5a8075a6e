"""What a plan says of its samples and its training in a few words: parts of a view (plan.py)."""

from __future__ import annotations

from dslc.compiler.ir.steps import StreamStep
from dslc.dsl.record import Record, record


@record
class ShareNode(Record):
    """`ranks` data ranks from `first_rank` on, each with `samples` of a batch, in the order of the batch."""

    first_rank: int
    ranks: int
    samples: int


@record
class PartNode(Record):
    """One source of a mixture: its samples, and how many of them an epoch has."""

    source: str
    train: int | None
    visited: int | None
    validation: int | None


@record
class DataNode(Record):
    """The samples, in the split and the order in which they are trained on, and the steps."""

    source: str
    parts: tuple[PartNode, ...] = ()
    documents: int | None = None  # the token that ends one
    train: int | None
    visited: int | None  # samples of an epoch
    order: str  # in words
    validation: int | None
    split: str
    shuffle: bool
    batch: int
    shares: tuple[ShareNode, ...]  # of a full batch
    last: int | None
    last_shares: tuple[ShareNode, ...]  # of an epoch's last, partial batch
    microbatch: int
    microbatches: int
    steps_per_epoch: int | None
    steps: int | None
    stream: StreamStep | None = None
    test: int | None = 0
    pictures: tuple[str, ...] = ()  # what they go through in training, by its names
    validation_sets: tuple[tuple[str, int], ...] = ()  # name and samples of sets that have names
    ahead: bool = False  # the outputs of all micro-batches are made first, as their loss compares them


@record
class TrainingNode(Record):
    """The settings of the training that a reader looks for first."""

    optimizer: str
    lr: float  # scaled
    lr_written: float
    lr_schedule: str
    precision: str
    clip: float | None
    clip_value: float | None = None
    seed: int
    restarts: int = 0
    own_step: bool = False  # a step of the user's own trains
