"""Dropout and other random numbers of forward passes that no plan changes.

Model: torch's dropout, `bernoulli_`, `uniform_`, `normal_` and others fill a tensor by one kernel each. Here each
kernel fills it by position instead (draw_kernels.py) while a module of the model runs, in a pass over a micro-batch.
The key is of the seed, the step, the layer and the number of its draw in the pass. The place in the sequence of numbers
is of the sample's place in the global batch, and of the element within the sample. So data ranks, micro-batches, stages
and ranks with a piece of the sequence draw what one process draws. So does a training that resumes, also on another
kind of device.

`SampleDraws` says which samples a pass is over. Recomputation enters the pass again (sample_pass.py), without states of
generators. The dropout of attention and of `nn.LSTM` goes through the same kernels.

Contract: the first dim of a filled tensor goes sample by sample, or the dim that the step's `dims` names; or the
numbers are the same for all samples. Memory and autograd are torch's own. Other threads, the network in an evaluation,
and calls with a generator get torch's numbers.

If a rank has some heads, features or positions of a draw, it makes the numbers of the whole sample, and takes its own.

Operations in graphs that are compiled bear the name of their layer (compiling.py).

Limits: on GPUs kernels of others than torch draw for themselves.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate

from dslc.compiler.ir.program import CutDraw, DrawStep, JobProgram, RankPlace
from dslc.compiler.ir.steps import OUTSIDE, DrawDims
from dslc.compiler.trace.private_torch import AnyDropout
from dslc.compiler.trace.structures import class_name
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.data.sampler import sizes_of, steps_per_epoch
from dslc.runtime.technique import compiling
from dslc.runtime.technique.draw_kernels import replace_kernels
from dslc.runtime.technique.sample_pass import (
    ACTIVE,
    LAYER,
    LAYERS,
    DrawingLayer,
    DrawPiece,
    Places,
    SamplePass,
    mark_by_sample,
    replay_checkpoints,
)

# ------------------------------------------------------------------------------------------------------- the layers


def apply(
    step: DrawStep | None,
    model: nn.Module,
    coordinates: Mapping[str, int],
    sizes: Mapping[str, int],
    device: torch.device,
) -> None:
    """Lets the modules of `model`, which will run on `device`, draw by sample, in place. Names, parameters and hooks
    stay.
    """
    if step is None:
        return
    replace_kernels(device.type)
    replay_checkpoints()
    dims = {draw.module: draw for draw in step.dims}
    for name, module in model.named_modules():
        kind = class_name(type(module))
        if not step.untried and not isinstance(module, AnyDropout) and kind not in (*step.kinds, *step.shared):
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
            dims=dims[name].dims if name in dims else (),
            outers=dims[name].outers if name in dims else (),
            cuts=_pieces_of(step, name, coordinates, sizes),
            by_shape=step.untried,
        )
        forward: Callable[..., object] = module.forward
        if device.type == "cuda" and isinstance(module, nn.RNNBase) and module.dropout > 0:
            forward = _without_cudnn(forward)
        module.forward = DrawingForward(forward, layer)
        LAYERS[name] = layer
        mark_by_sample(module)


def outside_layer(step: DrawStep, name: str = OUTSIDE, piece: tuple[int, int] = (0, 1)) -> DrawingLayer | None:
    """Returns the layer `name` of what a user's function draws outside of modules; None if it draws nothing there. It
    is given the piece of this number of so many.
    """
    if name not in (*step.kinds, *step.shared):
        return None
    dims = next((draw for draw in step.dims if draw.module == name), DrawDims(module=name, dims=()))
    return replace(_layer_of(dims, piece), shared=name in step.shared, by_shape=step.untried)


def _layer_of(dims: DrawDims, piece: tuple[int, int]) -> DrawingLayer:
    number, pieces = piece
    return DrawingLayer(
        name=dims.module,
        number=number,
        pieces=pieces,
        by_position=dims.by_position,
        dims=dims.dims,
        outers=dims.outers,
    )


def _pieces_of(
    step: DrawStep, name: str, coordinates: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[int, DrawPiece]:
    """Returns this rank's pieces of the draws of a module, by their numbers in a pass."""
    pieces: dict[int, DrawPiece] = {}
    for axis, cuts in (("tensor", step.tensor), ("context", step.context)):
        for cut in cuts:
            if cut.module != name:
                continue
            piece = pieces.get(cut.number) or DrawPiece(shape=cut.shape, places=tuple(map(np.arange, cut.shape)))
            places = [*piece.places]
            places[cut.dim] = np.intersect1d(places[cut.dim], _places(cut, coordinates[axis], sizes[axis]))
            pieces[cut.number] = replace(piece, places=tuple(places), columns=piece.columns or cut.columns)
    return pieces


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
        self.__wrapped__ = forward  # tells `inspect.signature` what the module takes

    def __call__(self, *args: object, **kwargs: object) -> object:
        before = ACTIVE.layer
        ACTIVE.layer = self.layer
        try:
            if torch.compiler.is_compiling():  # code outside of graphs finds the layer in `ACTIVE`
                with annotate({LAYER: self.layer.name}):
                    return self._forward(*args, **kwargs)
            return self._forward(*args, **kwargs)
        finally:
            ACTIVE.layer = before


def _without_cudnn(forward: Callable[..., object]) -> Callable[..., object]:
    """Returns a forward pass of a recurrent network, whose dropout cuDNN would draw within its kernels."""

    def run(*args: object, **kwargs: object) -> object:
        if ACTIVE.samples is None:
            return forward(*args, **kwargs)
        with torch.backends.cudnn.flags(enabled=False):
            return forward(*args, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------------- the passes


class SampleDraws:
    """Enters the passes of a rank's micro-batches, and the loss of each; does nothing for a job with torch's random
    numbers, unless its tensors are summarized by sample. Calls `notify` once if the shape of a draw goes by no
    samples.
    """

    def __init__(self, job: JobProgram, place: RankPlace, notify: Callable[[str], object] = warnings.warn) -> None:
        self._job, self._place = job, place
        self._notify: Callable[[str], object] | None = notify
        self._passes: list[SamplePass] = []
        self._layer = outside_layer(job.draws) if job.draws is not None else None
        self._loss_layer: DrawingLayer | None = None
        if job.loss.draws is not None:
            piece = place.coordinates["context"], job.axes["context"]
            self._loss_layer = _layer_of(job.loss.draws, piece)
            replace_kernels(job.device)
            replay_checkpoints()

    def begin(self, batch: StepBatch) -> None:
        """Takes up the batch of a step."""
        compiling.forget_passes()
        seen = self._job.observation
        if self._job.draws is None and self._loss_layer is None and not (seen is not None and seen.tensors):
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
            ACTIVE.samples, ACTIVE.layer = replace(self._passes[number], draws=Counter()), self._layer

    def leave(self) -> None:
        ACTIVE.samples = ACTIVE.layer = None
        if ACTIVE.misfit and self._notify is not None:
            self._notify(ACTIVE.misfit)
            self._notify = None
        ACTIVE.misfit = ""

    @contextmanager
    def in_loss(self) -> Iterator[None]:
        """Lets the loss of the pass that was entered draw by sample."""
        before = ACTIVE.layer
        ACTIVE.layer = self._loss_layer
        try:
            yield
        finally:
            ACTIVE.layer = before

    @contextmanager
    def in_evaluated_loss(self, split: str, first: int, samples: int) -> Iterator[None]:
        """Lets the loss of `samples` samples of a split, from number `first` on, draw by sample. Each evaluation draws
        the same numbers.
        """
        if self._loss_layer is None:
            yield
            return
        before = ACTIVE.samples, ACTIVE.layer
        ACTIVE.samples = SamplePass(seed=self._job.seed, step=0, first=first, samples=samples)
        ACTIVE.layer = replace(self._loss_layer, name=f"{self._loss_layer.name} of {split}")
        try:
            yield
        finally:
            ACTIVE.samples, ACTIVE.layer = before

    @contextmanager
    def in_gathered_loss(self, first: int, samples: int) -> Iterator[None]:
        """Lets a loss over the passes of all micro-batches and of other ranks draw by sample. The samples of this rank
        begin at `first` of `samples`.
        """
        if self._loss_layer is None:
            yield
            return
        before = ACTIVE.samples
        orders, start = [each.order for each in self._passes], self._passes[0].first
        order = None
        if samples == sum(each.samples for each in self._passes) and None not in orders:
            order = torch.cat([each.order + each.first - start for each in self._passes if each.order is not None])
        ACTIVE.samples = replace(
            self._passes[0], first=start - first, samples=samples, order=order, draws=Counter[str]()
        )
        try:
            with self.in_loss():
                yield
        finally:
            ACTIVE.samples = before
