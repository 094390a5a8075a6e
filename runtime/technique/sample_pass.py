"""The pass and the layer that draw random numbers by sample, in each thread (sample_draws.py enters them).

Contract: what `torch.utils.checkpoint` runs a second time, for `memory.recompute` or in a network's own code, draws
what it drew at first (`replay_checkpoints`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.utils import checkpoint

from dslc.compiler.ir.steps import SHARED
from dslc.compiler.trace.private_torch import CHECKPOINT
from dslc.runtime.technique import philox

Places = npt.NDArray[np.int64]
Buffer = TypeVar("Buffer", philox.Array, Tensor)


@dataclass(kw_only=True)
class SamplePass:
    """A forward pass over a micro-batch, whose samples are `first` and so on of the global batch of `step`."""

    seed: int
    step: int
    first: int
    samples: int
    order: Tensor | None = None  # the samples' places among these, where `dslc verify` changes their order
    draws: Counter[str] = field(default_factory=Counter)  # so far, by layer


@dataclass(frozen=True, kw_only=True)
class DrawPiece:
    """A rank's piece of a draw: the shape of one sample in one process, and the rank's places along each dim."""

    shape: tuple[int, ...]
    places: tuple[Places, ...]
    columns: bool = False  # the rank has as many of the last dim as its tensor

    _tensors: dict[tuple[torch.device, int, int], Tensor] = field(default_factory=dict, compare=False, repr=False)

    def take(self, whole: Buffer, size: int) -> Buffer:
        """Returns the `size` numbers of the piece."""
        places = [*self.places]
        if self.columns:
            places[-1] = np.arange(size // math.prod(map(len, places[:-1])))
        whole = whole.reshape(self.shape)
        for dim, along in enumerate(places):
            if len(along) < self.shape[dim]:
                whole = self._take_along(whole, dim, along)
        return whole.reshape(-1)

    def _take_along(self, whole: Buffer, dim: int, places: Places) -> Buffer:
        if not isinstance(whole, Tensor):
            return whole.take(places, dim)
        key = (whole.device, dim, len(places))
        if key not in self._tensors:  # kept, as a copy to a GPU waits for it
            self._tensors[key] = torch.from_numpy(places).to(whole.device)
        return whole.index_select(dim, self._tensors[key])


@dataclass(frozen=True, kw_only=True)
class DrawingLayer:
    """A module that draws. A rank has piece `number` of `pieces` of the second dim, the sequence, in the draws
    `by_position`, or in all for None; or of some of its draws, by their number in the pass, what `cuts` says. `dims`
    and `outers` are as in `DrawDims`; `shared`: of all its draws. `by_shape`: no trial has seen the draws, and their
    shapes tell the dims.
    """

    name: str
    number: int = 0
    pieces: int = 1
    by_position: tuple[int, ...] | None = None
    shared: bool = False
    dims: tuple[int, ...] = ()
    outers: tuple[int, ...] = ()
    cuts: Mapping[int, DrawPiece] = field(default_factory=dict, compare=False)
    by_shape: bool = False

    def dim_of(self, number: int, shape: Sequence[int], samples: int) -> int | None:
        """Returns the dim of a draw that goes by samples, or `SHARED`; None if no dim of its shape does."""
        if self.by_shape:
            return dim_of_shape(shape, samples)
        dim = SHARED if self.shared else self.dims[number] if number < len(self.dims) else 0
        rows = shape[dim] if len(shape) > dim >= 0 else 0
        return dim if dim == SHARED or (rows > 0 and rows % samples == 0) else None

    def outer_of(self, number: int) -> int:
        """Returns how often the samples of a draw follow each other along its dim."""
        return self.outers[number] if number < len(self.outers) else 1


def dim_of_shape(shape: Sequence[int], samples: int) -> int | None:
    """Returns the dim of a draw that goes by samples, as far as its shape tells: one of as many rows. `SHARED` if no
    dim can go by samples; None if one may have several rows for each.
    """
    if samples in shape:
        return shape.index(samples)
    return None if any(size % samples == 0 for size in shape) else SHARED


class _Active(threading.local):
    """The pass and the layer that run in this thread."""

    def __init__(self) -> None:  # in each thread: compiled code asks whether the names exist
        self.samples: SamplePass | None = None
        self.layer: DrawingLayer | None = None
        # Of the graph that torch compiles: the draws of each layer by name, of None for the layer that runs the graph.
        self.graph_draws: Counter[str | None] | None = None
        self.misfit = ""  # the first draw whose shape fits no dim of samples, in words


ACTIVE = _Active()
LAYER = "dslc_layer"  # the annotation of an operation in a graph of torch's compiler: the name of its layer
LAYERS: dict[str, DrawingLayer] = {}  # of this process, by name


_MARK = "_dslc_draws_by_sample"


def mark_by_sample(module: nn.Module) -> None:
    """Marks a module that draws by sample."""
    vars(module)[_MARK] = True


def is_by_sample(module: nn.Module) -> bool:
    """True if the module itself draws by sample, whatever has replaced its `forward` since."""
    return _MARK in vars(module)


def current_layer() -> DrawingLayer | None:
    """Returns the module that runs and draws by sample, if there is one."""
    return ACTIVE.layer


def begin_at(numbers: Mapping[DrawingLayer, int]) -> None:
    """Begins the draws of layers at these numbers: an earlier stage has drawn the numbers before."""
    if ACTIVE.samples is not None:
        for layer, number in numbers.items():
            ACTIVE.samples.draws[layer.name] = number


@contextlib.contextmanager
def in_layer(layer: DrawingLayer | None, drawn: int) -> Iterator[None]:
    """Runs code of a module that draws by sample outside of its forward pass, after earlier draws of the module."""
    if layer is not None and torch.compiler.is_compiling():
        with annotate({LAYER: layer.name}):
            yield
        return
    before = ACTIVE.layer
    ACTIVE.layer = layer
    if layer is not None and ACTIVE.samples is not None:
        ACTIVE.samples.draws[layer.name] = drawn
    try:
        yield
    finally:
        ACTIVE.layer = before


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Leaves draws to torch within a pass: those of exchanges and of optimizers."""
    before = ACTIVE.samples, ACTIVE.layer
    ACTIVE.samples = ACTIVE.layer = None
    try:
        yield
    finally:
        ACTIVE.samples, ACTIVE.layer = before


def current_pass() -> SamplePass | None:
    """Returns the pass that runs, as it is now."""
    samples = ACTIVE.samples
    return None if samples is None else replace(samples, draws=samples.draws.copy())


@functools.cache
def replay_checkpoints() -> None:
    """Lets whatever `torch.utils.checkpoint` runs a second time in this process draw what it drew at first."""
    names = vars(checkpoint)
    begin = names[CHECKPOINT]

    @functools.wraps(begin)
    def begin_replayed(function: Callable[..., object], *options: object, **named: object) -> object:
        return begin(_Replayed(function, runs_first=False), *options, **named)

    class ReplayedFunction(checkpoint.CheckpointFunction):
        @classmethod
        def apply(cls, *args: Any, **named: object) -> object:
            function = _Replayed(args[0], runs_first=True)
            return super().apply(function, *args[1:], **named)  # type: ignore[no-untyped-call]

    names[CHECKPOINT], names["CheckpointFunction"] = begin_replayed, ReplayedFunction


class _Replayed:
    """A function that runs again in a backward pass. `runs_first`: its first call is the one in the forward pass."""

    def __init__(self, function: Callable[..., object], *, runs_first: bool) -> None:
        self._function, self._runs_first = function, runs_first
        self._samples, self._layer = current_pass(), ACTIVE.layer

    def __call__(self, *args: object, **named: object) -> object:
        if self._runs_first or self._samples is None:
            self._runs_first = False
            return self._function(*args, **named)
        before = ACTIVE.samples, ACTIVE.layer
        ACTIVE.samples, ACTIVE.layer = replace(self._samples, draws=self._samples.draws.copy()), self._layer
        try:
            return self._function(*args, **named)
        finally:
            ACTIVE.samples, ACTIVE.layer = before
