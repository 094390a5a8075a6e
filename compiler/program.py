"""The rank program: the only thing the runtime receives. Everything in it is decided.

A program is plain data: frozen dataclasses of numbers, text, tuples and mappings, the same on every machine, written as
JSON by `to_json` and read back by `from_json`. The runtime imports this module and nothing else of the compiler.

All programs of a job share everything but `place`: a `RankProgram` is the job's `JobProgram` and this rank's place.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Value = Any  # None, bool, int, float, str, tuples of these
Arguments = Mapping[str, Value]


@dataclass(frozen=True, kw_only=True)
class ModuleStep:
    """Builds one module, then its children, which become its attributes.

    `kind` is a class of `torch.nn` (`Conv2d`), or one of `dslc.runtime.modules` (`.Attention`).
    """

    name: str  # the attribute's name in its parent; "" for the root
    kind: str
    arguments: Arguments = field(default_factory=dict)
    children: tuple[ModuleStep, ...] = ()
    line: str = ""  # "digits.plt:6:5": what an error names


@dataclass(frozen=True, kw_only=True)
class InitStep:
    """The initial value of one parameter: `uniform` in [a, b), `normal` with mean a and deviation b, `constant` a.

    Drawn alone, in float32, from a generator seeded with (seed, name): LANGUAGE.md, invariant 2.
    """

    parameter: str  # its full name in the unwrapped model
    shape: tuple[int, ...]
    kind: Literal["uniform", "normal", "constant"]
    a: float
    b: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PythonFunction:
    """`module:function` of the user's, and its keyword arguments. `folder` is put first on `sys.path`."""

    function: str
    arguments: Arguments = field(default_factory=dict)
    folder: str = ""
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelStep:
    """The model: `root` with `inits` and `ties`, or `python`."""

    root: ModuleStep | None = None
    inits: tuple[InitStep, ...] = ()
    ties: tuple[tuple[str, str], ...] = ()  # (parameter, the parameter whose tensor it is)
    python: PythonFunction | None = None
    seed: int = 0
    channels_last: bool = False


@dataclass(frozen=True, kw_only=True)
class LossStep:
    """The loss, as a sum over samples or tokens; the runtime divides it by the global count.

    `counts` says what is counted: `samples`; `tokens` (all elements of the target, known from its shape); `kept`: the
    elements of the target that are not `ignore`, which the ranks have to agree on before the first backward.
    """

    kind: Literal["cross_entropy", "mse", "l1", "bce", "python"]
    arguments: Arguments = field(default_factory=dict)
    counts: Literal["samples", "tokens", "kept"] = "samples"
    ignore: int | None = None
    python: PythonFunction | None = None
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class DataStep:
    """The samples, and how an epoch of them is dealt out.

    Order: epoch `e` visits the `train_samples` in the order `permutation(seed, e)` (or as they are); global batch `k`
    of it is entries `k*batch` to `(k+1)*batch`; the last, of `last` samples, exists with `keep` alone. A data rank
    takes a contiguous share of each global batch, sizes differing by at most one, the larger first; a share is cut into
    micro-batches in the same way.
    """

    source: str  # digits, stdlib, text, arrays, synthetic, python
    arguments: Arguments = field(default_factory=dict)
    python: PythonFunction | None = None
    train_samples: int
    validation_samples: int
    split: Literal["random", "tail", "given", "none"]  # by the seed; the end of the stream; a pair of data sets; none
    seed: int
    shuffle: bool
    batch: int
    last: int  # samples of the last, partial batch of an epoch; 0 if there is none or it is dropped
    workers: int
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class OptimizerStep:
    """A class of `torch.optim` and its arguments; `lr` is already scaled."""

    kind: str
    lr: float
    arguments: Arguments = field(default_factory=dict)
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class LearningRateStep:
    """The factor on `lr` for step s (from 0) of `steps`.

    warm-up: (s + 1) / warmup for s < warmup. Then `cosine` and `linear` fall from 1 to `floor` over the rest;
    `constant` stays; `step` is factor ** ((s - warmup) // every); `exponential` is factor ** ((s - warmup) / every).
    """

    kind: Literal["constant", "cosine", "linear", "step", "exponential"] = "constant"
    steps: int
    warmup: int = 0
    floor: float = 0.0
    every: int = 1
    factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MetricStep:
    """One metric, exact over a split: sums over samples (or tokens) and one division at the end."""

    kind: Literal["loss", "accuracy", "top_k", "perplexity", "mse"]
    name: str  # as it stands in metrics.jsonl: "top_5"
    k: int = 1


@dataclass(frozen=True, kw_only=True)
class PrecisionStep:
    """`dtype` of autocast; `scaled` asks for loss scaling."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    scaled: bool = False


@dataclass(frozen=True, kw_only=True)
class GradientStep:
    """How gradients are agreed over the data axis. `none` for one rank, else DistributedDataParallel."""

    kind: Literal["none", "ddp"]
    bucket_megabytes: float = 25.0
    static_graph: bool = False
    find_unused: bool = False


@dataclass(frozen=True, kw_only=True)
class JobProgram:
    """What all ranks of a job have in common."""

    job: str  # its name
    file: str  # the job file as messages name it
    plan_hash: str
    world_size: int
    processes: int  # on each node
    device: Literal["cpu", "cuda"]
    gpus: tuple[int, ...] = ()  # which GPU each local rank takes
    backend: str
    timeout: float  # seconds
    threads: int  # of one process; 0: the machine's cores shared out
    model: ModelStep
    sync_batch_norm: bool
    loss: LossStep
    data: DataStep
    microbatches: int
    steps: int
    steps_per_epoch: int
    optimizer: OptimizerStep
    learning_rate: LearningRateStep
    clip: float | None
    precision: PrecisionStep
    gradients: GradientStep
    evaluate_every: int  # steps; 0: at the end only, and nothing where there is no validation split
    metrics: tuple[MetricStep, ...]
    log_every: int
    tensorboard: bool
    deterministic: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where one rank stands."""

    rank: int
    node: int
    local_rank: int
    coordinates: Mapping[str, int]  # by axis: {"data": 1}
    data_rank: int
    data_ranks: int


@dataclass(frozen=True, kw_only=True)
class RankProgram:
    job: JobProgram
    place: RankPlace


# ---------------------------------------------------------------------------------------------------------- JSON

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Dataclasses as objects, tuples as lists; the result is what `json.dumps` takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any) -> T:
    """The value of dataclass `kind` that `to_json` wrote as `data`."""
    made: T = _read(kind, data)
    return made


def _read(kind: Any, data: Any) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _read(hints[name], item) for name, item in data.items()})
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        return _read(next(k for k in typing.get_args(kind) if k is not type(None)), data)
    if origin is tuple:
        items = typing.get_args(kind)
        if len(items) == 2 and items[1] is Ellipsis:
            return tuple(_read(items[0], item) for item in data)
        return tuple(_read(k, item) for k, item in zip(items, data, strict=True))
    if origin is not None and issubclass(origin, Mapping) if isinstance(origin, type) else False:
        return {key: _read(typing.get_args(kind)[1], item) for key, item in data.items()}
    if isinstance(data, list):
        return tuple(_read(Any, item) for item in data)
    return data
