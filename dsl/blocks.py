"""The blocks of a job and their fields, as LANGUAGE.md lists them."""

from __future__ import annotations

from typing import ClassVar

from dslc.dsl import calls as c
from dslc.dsl.layers import Layers
from dslc.dsl.registry import (
    Block,
    Bool,
    Call,
    Float,
    Int,
    ListOf,
    Name,
    Path,
    Quantity,
    Range,
    Span1,
    Str,
    arg,
    block,
    calls,
    either,
    measure,
    word,
)

_COUNT = Int(min=1)
_NAMES = ListOf(Str())
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zero_bubble", "zbv", "dualpipev")


@block
class ModelSpec(Block):
    """What is trained, and what its output is measured by."""

    network: Layers | Call = arg(
        either(ListOf(calls("layer"), min_length=1), calls("network")),
        "a list of layers, a library network, or `python(\"module:function\")`",
    )
    loss: Call = arg(calls("loss"), "what is made small")
    weights: str | None = arg(Path("read"), "a file of weights to start from", None)
    freeze: tuple[str, ...] = arg(_NAMES, "patterns of parameters that do not train", (), shown="none")


@block
class DataSpec(Block):
    """What it is trained on."""

    source: Call = arg(calls("source"), "where samples come from")
    batch: int = arg(
        _COUNT, "the global batch: the samples (sequences, for text) that one optimizer step sees, whatever the split"
    )
    validation: float = arg(
        measure("ratio", min=0, below=1), "the share held out, by the seed alone; for text, the end of the stream", 0.0
    )
    shuffle: bool = arg(Bool(), "a new order for each epoch", True)
    workers: int = arg(Int(min=0), "loader processes of each rank", 0)
    last_batch: str = arg(word("drop", "keep"), "what is left of an epoch when no full batch is", "drop")


@block
class DevicesSpec(Block):
    """What it is trained on: nodes, and the processes of each."""

    exclusive: ClassVar = (("gpus", "cpus"),)
    nodes: int | Range = arg(either(Span1(), _COUNT), "a count, or a range `1..4`: elastic", 1)
    gpus: int | tuple[int, ...] | str | Call | None = arg(
        either(
            calls("gpus"),
            word("all"),
            ListOf(Int(min=0), min_length=1),
            Str(r"\s*-?\d+\s*(,\s*\d+\s*)*", 'numbers of GPUs, as in "0, 2"'),
            Int(min=-1),
        ),
        "processes for each node, one a GPU: a count, `[0, 2]`, `\"0, 2\"`, `all` (or `-1`), `free(4)`",
        None,
    )
    cpus: int | None = arg(_COUNT, "processes for each node on the CPU", None, shown="1")
    kind: str | None = arg(Name(), "from the hardware catalogue", None, shown="found")
    backend: str | None = arg(word("nccl", "gloo", "mpi"), "what carries the collectives", None, shown="by device")


@block
class ParallelismSpec(Block):
    """How the work is split over the devices."""

    whole: ClassVar = "auto"
    auto: bool = arg(Bool(), "the compiler chooses the whole block; written `parallelism = auto`", False)
    data: int | None = arg(_COUNT, "ranks that share a global batch", None, shown="what remains")
    pipeline: int = arg(_COUNT, "stages in sequence, each on ranks of its own", 1)
    tensor: int = arg(_COUNT, "ranks that share each layer", 1)
    context: int = arg(_COUNT, "ranks that share each sequence", 1)
    zero: int = arg(
        Int(min=0, max=3), "over `data`: 1, optimizer state sharded; 2, and gradients; 3, and parameters", 0
    )
    replicas: int = arg(_COUNT, "full copies kept inside the data axis", 1)
    microbatches: int | None = arg(
        _COUNT,
        "pieces in which a data rank works through its share of a global batch",
        None,
        shown="1, or by the schedule",
    )
    schedule: str = arg(word(*SCHEDULES), "the order of micro-batches in a pipeline", "1f1b")
    virtual_stages: int | None = arg(_COUNT, "stages for each rank", None, shown="by the schedule")
    stages: str | tuple[int, ...] = arg(
        either(word("balanced"), ListOf(_COUNT, min_length=1)), "where the model is cut, or layer counts", "balanced"
    )
    sequence: bool = arg(Bool(), "sequence parallelism with `tensor`", True)
    tensor_plan: tuple[str, ...] | None = arg(
        _NAMES, "styles by pattern, `\"blocks.*.up: column\"`, for `python(…)` models", None, shown="known"
    )
    gradients: Call = arg(calls("gradients"), "how gradients are agreed", c.Allreduce(), shown="allreduce()")


@block
class MemorySpec(Block):
    """What is kept, what is computed again, what is moved away."""

    recompute: str | Call = arg(
        either(word("none", "full", "selective"), calls("recompute")), "activations computed again", "none"
    )
    offload: tuple[str, ...] = arg(
        ListOf(word("optimizer", "parameters", "activations"), single=True),
        "what is kept in the host's memory",
        (),
        shown="[]",
    )
    limit: int | None = arg(measure("bytes", above=0), "the most one device may use", None, shown="the device's")


@block
class TrainSpec(Block):
    """How long, and by which rule."""

    exclusive: ClassVar = (("steps", "epochs"),)
    one_of: ClassVar = (("steps", "epochs"),)
    steps: int | None = arg(measure("steps", min=1), "optimizer steps", None)
    epochs: int | None = arg(measure("epochs", min=1), "times through the data", None)
    optimizer: Call = arg(calls("optimizer"), "the rule of an update")
    lr_schedule: Call = arg(calls("lr_schedule"), "the learning rate over time", c.Constant(), shown="constant")
    scale_lr: Call | None = arg(calls("lr_scale"), "the learning rate follows the batch", None, shown="none")
    no_decay: tuple[str, ...] = arg(_NAMES, "patterns of parameters without weight decay", (), shown="none")
    clip: float | None = arg(Float(above=0), "the largest global norm of the gradients", None, shown="none")
    precision: Call = arg(calls("precision"), "of the arithmetic", c.Fp32(), shown="fp32")
    seed: int = arg(Int(min=0, max=2**63 - 1), "all that is random follows from it", 0)
    compile: bool = arg(Bool(), "`torch.compile`", False)
    deterministic: bool = arg(Bool(), "the same plan gives the same bits", False)


@block
class EvaluateSpec(Block):
    """Exact figures over the whole validation split."""

    every: Quantity | None = arg(
        measure("steps", "epochs", above=0), "how often", None, shown="the end"
    )
    metrics: tuple[Call, ...] = arg(
        ListOf(calls("metric"), min_length=1), "what is measured", (c.LossMetric(),), shown="[loss]"
    )


@block
class CheckpointSpec(Block):
    """What is left behind to go on from."""

    every: Quantity | None = arg(measure("steps", "epochs", "time", above=0), "how often", None, shown="none")
    keep: int = arg(_COUNT, "how many are kept", 2)
    asynchronous: bool = arg(Bool(), "training goes on while it is written", True)
    dir: str | None = arg(Path("write"), "where", None, shown="<run>/checkpoints")
    resume: str | None = arg(
        either(word("auto"), Path("read")), "from the newest, or from this one", None, shown="none"
    )


@block
class LaunchSpec(Block):
    """Who starts the processes, and what happens when one fails."""

    with_: Call = arg(calls("launch"), "who starts the processes", c.Local(), shown="local()")
    restarts: int = arg(Int(min=0), "restarts of a failed group from its last checkpoint", 0)
    timeout: float = arg(measure("time", above=0), "the longest wait of a collective", 600.0, shown="10 min")


@block
class LogSpec(Block):
    """What is written while it trains."""

    every: Quantity = arg(
        measure("steps", "epochs", above=0), "how often", Quantity(10, "steps"), shown="10 steps"
    )
    tensorboard: bool = arg(Bool(), "whether TensorBoard files are written", True)
