"""Dropout and other random numbers of forward passes that no plan changes.

Model: torch's dropout, `bernoulli_`, `uniform_` and `normal_` fill a tensor on the CPU by one kernel each. Here each
kernel fills it by position instead (philox.py) while a module of the model runs, in a pass over a micro-batch. The key
is of the seed, the step, the layer and the number of its draw in the pass. The place in the sequence of numbers is of
the sample's place in the global batch, and of the element within the sample. So data ranks, micro-batches, stages and
ranks with a piece of the sequence draw what one process draws, and so does a training that resumes.

`SampleDraws` says which samples a pass is over. Recomputation enters the pass again (`replayed`), without states of
generators. The dropout of attention and of `nn.LSTM` goes through the same kernels.

Contract: the first dim of a filled tensor goes sample by sample, or the layer is one of `shared`, whose numbers are the
same for all samples. Memory and autograd are torch's own. Other threads, other passes (an evaluation) and calls with a
generator get torch's numbers.

Of a draw of which a rank has some heads, features or positions it makes the numbers of the whole sample, and takes its
own.

Compiled code has a generator of its own. There the mask of an `nn.Dropout` comes from an operator,
`dslc::dropout_mask`, which `torch.compile` calls as it is.

Limits: CPU only; within `torch.compile` only `nn.Dropout`, without recomputation, whose second pass would draw anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dslc.compiler.ir.program import CutDraw, DrawStep, JobProgram, RankPlace
from dslc.compiler.trace.private_torch import AnyDropout
from dslc.compiler.trace.structures import class_name
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.data.sampler import sizes_of, steps_per_epoch
from dslc.runtime.technique import philox

Places = npt.NDArray[np.int64]
Fill = Callable[[philox.Array, int, int], None]  # fills an array from a key's place on


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

    def take(self, whole: philox.Array, size: int) -> philox.Array:
        """Returns the `size` numbers of the piece."""
        places = [*self.places]
        if self.columns:
            places[-1] = np.arange(size // math.prod(map(len, places[:-1])))
        return whole.reshape(self.shape)[np.ix_(*places)].reshape(-1)


@dataclass(frozen=True, kw_only=True)
class DrawingLayer:
    """A module that draws. A rank has piece `number` of `pieces` of the second dim, the sequence; or of some of its
    draws, by their number in the pass, what `cuts` says.
    """

    name: str
    number: int = 0
    pieces: int = 1
    shared: bool = False
    cuts: Mapping[int, DrawPiece] = field(default_factory=dict, compare=False)


class _Active(threading.local):
    """The pass and the layer that run in this thread."""

    samples: SamplePass | None = None
    layer: DrawingLayer | None = None


_ACTIVE = _Active()
_MARK = "_dslc_draws_by_sample"
_LIBRARY: list[torch.library.Library] = []  # holds the kernels, once they are replaced
_LAYERS: dict[str, DrawingLayer] = {}  # of compiled code, by name


# ------------------------------------------------------------------------------------------------------- the layers


def apply(
    step: DrawStep | None,
    model: nn.Module,
    coordinates: Mapping[str, int],
    sizes: Mapping[str, int],
    *,
    compiled: bool = False,
) -> None:
    """Lets the modules of `model` that draw do so by sample, in place. Names, parameters and hooks stay. `compiled`:
    some modules will be compiled.
    """
    if step is None:
        return
    _replace_kernels()
    for name, module in model.named_modules():
        kind = class_name(type(module))
        if not isinstance(module, AnyDropout) and kind not in (*step.kinds, *step.shared):
            continue
        # The second dim of the library's layers is the sequence; `cuts` tell of a network that a function makes.
        of_library = not (step.kinds or step.shared)
        number, pieces = (coordinates["context"], sizes["context"]) if of_library else (0, 1)
        if name in step.pieces:
            number, pieces = number * sizes["tensor"] + coordinates["tensor"], pieces * sizes["tensor"]
        layer = DrawingLayer(
            name=name,
            number=number,
            pieces=pieces,
            shared=kind in step.shared,
            cuts=_pieces_of(step, name, coordinates, sizes),
        )
        forward: Callable[..., object] = DrawingForward(module.forward, layer)
        if compiled and type(module) is nn.Dropout:
            forward = _masked_forward(module, layer)
        module.forward = forward
        vars(module)[_MARK] = True


def _pieces_of(
    step: DrawStep, name: str, coordinates: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[int, DrawPiece]:
    """Returns this rank's pieces of the draws of a module, by their numbers in a pass."""
    found: dict[int, DrawPiece] = {}
    for axis, cuts in (("tensor", step.tensor), ("context", step.context)):
        for cut in cuts:
            if cut.module != name:
                continue
            piece = found.get(cut.number) or DrawPiece(shape=cut.shape, places=tuple(map(np.arange, cut.shape)))
            places = [*piece.places]
            places[cut.dim] = np.intersect1d(places[cut.dim], _places(cut, coordinates[axis], sizes[axis]))
            found[cut.number] = replace(piece, places=tuple(places), columns=piece.columns or cut.columns)
    return found


def _places(cut: CutDraw, number: int, ranks: int) -> Places:
    """Returns where piece `number` lies along the dim that is cut."""
    if not cut.parts:
        own = cut.size // ranks
        blocks = np.arange(cut.shape[cut.dim]).reshape(cut.outer, cut.size, -1)
        return blocks[:, number * own : (number + 1) * own].reshape(-1)
    starts = itertools.accumulate(cut.parts[:-1], initial=0)
    owns = [size // ranks for size in cut.parts]
    return np.concatenate([np.arange(own) + start + number * own for start, own in zip(starts, owns, strict=True)])


class DrawingForward:
    """The forward pass of a module whose draws are by sample."""

    def __init__(self, forward: Callable[..., object], layer: DrawingLayer) -> None:
        self._forward, self.layer = forward, layer

    def __call__(self, *args: object, **kwargs: object) -> object:
        before = _ACTIVE.layer
        _ACTIVE.layer = self.layer
        try:
            return self._forward(*args, **kwargs)
        finally:
            _ACTIVE.layer = before


def _masked_forward(module: nn.Dropout, layer: DrawingLayer) -> Callable[[Tensor], Tensor]:
    """Returns a forward pass of a dropout that can be compiled."""
    make_mask, name, calls = _mask_operator(), layer.name, torch.zeros((), dtype=torch.int64)
    _LAYERS[name] = layer

    def forward(x: Tensor) -> Tensor:
        if not module.training or module.p == 0:
            return x
        mask: Tensor = make_mask(calls, x.detach(), 1 - module.p, name)
        return x * mask

    return forward


@functools.cache
def _mask_operator() -> Callable[..., Tensor]:
    """Returns `dslc::dropout_mask`. As it counts its `calls`, torch merges no two of a layer and keeps their order."""

    def make_mask(calls: Tensor, like: Tensor, keep: float, layer: str) -> Tensor:
        calls += 1
        before = _ACTIVE.layer
        _ACTIVE.layer = _LAYERS[layer]
        try:
            return torch.empty_like(like).bernoulli_(keep).div_(keep)
        finally:
            _ACTIVE.layer = before

    make_mask.__annotations__ = {"calls": Tensor, "like": Tensor, "keep": float, "layer": str, "return": Tensor}
    operator = torch.library.custom_op("dslc::dropout_mask", make_mask, mutates_args=("calls",))
    operator.register_fake(lambda calls, like, keep, layer: torch.empty_like(like))
    return operator


def current_layer() -> DrawingLayer | None:
    """Returns the module that runs and draws by sample, if there is one."""
    return _ACTIVE.layer


@contextlib.contextmanager
def in_layer(layer: DrawingLayer | None, drawn: int) -> Iterator[None]:
    """Runs code of a module that draws by sample outside of its forward pass, after earlier draws of the module."""
    before = _ACTIVE.layer
    _ACTIVE.layer = layer
    if layer is not None and _ACTIVE.samples is not None:
        _ACTIVE.samples.draws[layer.name] = drawn
    try:
        yield
    finally:
        _ACTIVE.layer = before


def is_by_sample(module: nn.Module) -> bool:
    """True if the module itself draws by sample, whatever has replaced its `forward` since."""
    return _MARK in vars(module)


# ------------------------------------------------------------------------------------------------------- the passes


class SampleDraws:
    """Enters the passes of a rank's micro-batches; does nothing for a job with torch's random numbers, unless its
    tensors are summarized by sample.
    """

    def __init__(self, job: JobProgram, place: RankPlace) -> None:
        self._job, self._place = job, place
        self._passes: list[SamplePass] = []

    def begin(self, batch: StepBatch) -> None:
        """Takes up the batch of a step."""
        seen = self._job.observation
        if self._job.draws is None and not (seen is not None and seen.tensors):
            return
        data = self._job.data
        first, _, sizes = sizes_of(data, self._place, self._job.microbatches, batch.number % steps_per_epoch(data))
        starts = itertools.accumulate(sizes[:-1], initial=first)
        orders: Sequence[Tensor | None] = batch.orders or [None] * len(sizes)
        self._passes = [
            SamplePass(seed=self._job.seed, step=batch.number, first=start, samples=size, order=order)
            for start, size, order in zip(starts, sizes, orders, strict=True)
        ]

    def enter(self, number: int) -> None:
        """Enters the pass over micro-batch `number`, at its first draw."""
        if self._passes:
            _ACTIVE.samples = replace(self._passes[number], draws=Counter())

    def leave(self) -> None:
        _ACTIVE.samples = None


def current_pass() -> SamplePass | None:
    """Returns the pass that runs, as it is now."""
    samples = _ACTIVE.samples
    return None if samples is None else replace(samples, draws=samples.draws.copy())


@contextlib.contextmanager
def replayed(samples: SamplePass | None, within: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Goes on in a pass as it was when `current_pass` returned it."""
    before = _ACTIVE.samples
    _ACTIVE.samples = None if samples is None else replace(samples, draws=samples.draws.copy())
    try:
        with within:
            yield
    finally:
        _ACTIVE.samples = before


# ------------------------------------------------------------------------------------------------------ the kernels


def _replace_kernels() -> None:
    """Replaces torch's kernels, once in a process."""
    if _LIBRARY:
        return
    _LIBRARY.append(torch.library.Library("aten", "IMPL"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch says that a kernel is replaced
        for name, filling in (("bernoulli_.float", _bernoulli), ("uniform_", _uniform), ("normal_", _normal)):
            kernel = _kernel(torch.library.get_kernel(f"aten::{name}", "CPU"), filling)
            _LIBRARY[0].impl(name, kernel, "CPU", with_keyset=True, allow_override=True)


def _kernel(original: Any, filling: Callable[..., tuple[torch.dtype | None, Fill]]) -> Callable[..., Tensor]:
    def kernel(keys: object, tensor: Tensor, *args: float, generator: torch.Generator | None = None) -> Tensor:
        samples, layer = _ACTIVE.samples, _ACTIVE.layer
        if samples is not None and layer is not None and generator is None and _is_by_sample(tensor, samples, layer):
            dtype, fill = filling(tensor, *args)
            _fill(tensor, samples, layer, dtype, fill)
            return tensor
        result: Tensor = original.call_boxed(keys, tensor, *args, generator=generator)
        return result

    return kernel


def _is_by_sample(tensor: Tensor, samples: SamplePass, layer: DrawingLayer) -> bool:
    return layer.shared or (tensor.dim() > 0 and tensor.shape[0] > 0 and tensor.shape[0] % samples.samples == 0)


_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # by bytes


def _bernoulli(tensor: Tensor, probability: float = 0.5) -> tuple[torch.dtype | None, Fill]:
    # The bits of one, as numpy has no bfloat16.
    unsigned = _UNSIGNED[tensor.element_size()]
    one = int(torch.ones((), dtype=tensor.dtype).view(unsigned))
    return unsigned, lambda out, key, first: philox.bernoulli(out, key, first, probability, one)


def _uniform(tensor: Tensor, low: float = 0.0, high: float = 1.0) -> tuple[torch.dtype | None, Fill]:
    return None, lambda out, key, first: philox.uniform(out, key, first, low, high)


def _normal(tensor: Tensor, mean: float = 0.0, deviation: float = 1.0) -> tuple[torch.dtype | None, Fill]:
    return None, lambda out, key, first: philox.normal(out, key, first, mean, deviation)


def _fill(tensor: Tensor, samples: SamplePass, layer: DrawingLayer, view: torch.dtype | None, fill: Fill) -> None:
    """Fills a tensor: its bits as `view`, or its numbers."""
    number = samples.draws[layer.name]
    samples.draws[layer.name] += 1
    named = f"{samples.seed}/{samples.step}/{layer.name}/{number}".encode()
    key = int.from_bytes(hashlib.blake2b(named, digest_size=16).digest(), "little")
    in_place = tensor.is_contiguous() and samples.order is None and (view is not None or _is_of_numpy(tensor))
    target = tensor if in_place else torch.empty(tensor.shape, dtype=tensor.dtype if view else torch.float64)
    numbers = target.detach().view(view).numpy() if view else target.detach().numpy()
    if layer.shared:
        fill(numbers.reshape(-1), key, 0)
    else:
        _fill_samples(numbers.reshape(samples.samples, -1), key, samples.first, layer, number, fill)
    if in_place:
        return
    if samples.order is not None and not layer.shared:
        rows = target.view(samples.samples, -1)
        target = rows[samples.order.to(rows.device)].view(target.shape)
    tensor.copy_(target)


def _is_of_numpy(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


def _fill_samples(rows: philox.Array, key: int, first: int, layer: DrawingLayer, number: int, fill: Fill) -> None:
    size = rows.shape[1]  # numbers of a sample on this rank
    piece = layer.cuts.get(number)
    if piece is not None:
        whole = np.empty(math.prod(piece.shape), rows.dtype)
        for sample, row in enumerate(rows, first):
            fill(whole, key, sample * len(whole))
            row[:] = piece.take(whole, size)
        return
    if layer.pieces == 1:
        fill(rows.reshape(-1), key, first * size)
        return
    for sample, row in enumerate(rows, first):
        fill(row, key, (sample * layer.pieces + layer.number) * size)
