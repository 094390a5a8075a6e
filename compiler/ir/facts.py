"""Facts that a plan needs and the job does not state: the data on disk, the machine, a user's own functions.

Facts are gathered before anything is planned and passed in, so that compiling is a pure function: same job and same
facts, same plan, on any machine. An unknown fact is None, and figures that depend on it are shown as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from dslc.compiler.ir.network_facts import NetworkFacts, OptimizerFacts
from dslc.compiler.ir.tensors import TensorFact, TreeFact
from dslc.dsl.record import Record, record

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts


@record
class SourceFacts(Record):
    """The facts of a data source. `missing` names what is absent or wrong, `help` the remedy, and `code` the kind:
    E0309, no data; E0803, a library that is not installed; else another fault.
    """

    samples: int | None = None  # all of them, before a validation split
    validation_samples: int | None = None  # of a pair (train, validation); then `samples` is the first
    test_samples: int | None = None  # of a triple (train, validation, test)
    input: TensorFact | None = None
    target: TensorFact | None = None
    structures: tuple[TreeFact, TreeFact] | None = None  # of input and target, in place of these two
    classes: int | None = None  # targets are 0 <= t < classes
    vocab: int | None = None  # inputs are tokens 0 <= t < vocab
    stream: bool = False  # cut from one stream: the validation split is its end
    shards: int | None = None  # of a stream whose samples come one after another; `samples` is None if it does not tell
    held_shards: tuple[int, ...] = ()  # the samples of each shard, if the validation set is such a stream, too
    changes: int | None = None  # a user's sample that differed when it was fetched again
    uneven: tuple[str, tuple[int, ...], tuple[int, ...]] | None = (
        None  # a place in a structure, and shapes it has there
    )
    collate_draws: bool = False  # a user's `collate` draws random numbers
    loss_counts: bool = False  # a user's own loss, tried on two samples, gave (sum, count), or further losses
    found: Mapping[str, Any] = field(default_factory=dict)  # files, layouts and sets that the runtime opens
    missing: str = ""
    help: str = ""
    code: str = "E0309"
    argument: str = ""  # the source's argument at fault
    parts: tuple[SourceFacts, ...] = ()  # of a mixture


@record
class TensorEntry(Record):
    """A tensor of a file of weights."""

    dtype: str  # F32, BF16, I64, …
    shape: tuple[int, ...]


@record
class MachineFacts(Record):
    """The machine the job runs on; for `run` alone."""

    cores: int
    memory: int  # bytes
    gpus: tuple[int, ...] = ()  # bytes of each; with `gpus = free(n)` of those that are taken
    fault: str = ""  # why its GPUs are unknown
    gpus_in_use: int = 0  # others, which are not free


@record
class Facts(Record):
    """`made` is a network that could be made and not called; only its tensors are known. `weights` are the tensors of
    the files that `model.weights` names, if only torch can read them. `step_draws` are the draws of a user's own step,
    the network's in it among them, and nothing else; `loss_draws` are the draws of a user's own loss.
    """

    source: SourceFacts | None = None
    model: ModelFacts | None = None
    made: ModelFacts | None = None
    optimizer: OptimizerFacts | None = None  # of a user's own
    weights: Mapping[str, TensorEntry] | None = None
    machine: MachineFacts | None = None
    step_draws: NetworkFacts | None = None
    loss_draws: NetworkFacts | None = None
