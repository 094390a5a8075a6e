"""Finds the order of a draw's rows that has several of them for each sample, as one of (samples * positions, width).

Model: the samples of the input are followed through the operations as if ranks shared them out (propagation.py). Where
they lie in the tensor that a draw fills tells how often they follow each other along its dim.

Limits: the order is unknown after an operation that works across samples or has no rule, and of a tensor that is made
of a shape alone, as by `torch.rand`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from dslc.compiler.ir.steps import DrawDims
from dslc.compiler.trace.batch import SMALL
from dslc.compiler.trace.draws import CHOICE, Draw, is_draw
from dslc.compiler.trace.private_torch import Arguments, Operator, Options
from dslc.compiler.trace.run import Run, TensorMap, TracedModule, tensors_of
from dslc.compiler.trace.sharding.propagation import ShareError, TensorOperation, TensorShare, follow

# Operations without a rule for shares whose main result has the samples where the first tensor has them.
_LEAVES_IN_PLACE = ("native_batch_norm", "_native_batch_norm_legit", "native_group_norm", "mkldnn_rnn_layer")


class SampleFollower:
    """Follows the `samples` of an input. `draws` says where they lie in what each draw fills; None: nothing tells."""

    def __init__(self, samples: int, input: object) -> None:
        self.samples = samples
        self.draws: list[TensorShare | None] = []
        self._shares = TensorMap[TensorShare]()
        self._shares.fill(
            [tensor for tensor in tensors_of(input) if tensor.shape[:1] == (samples,)], TensorShare(0, 1, samples)
        )

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        """Called after each operation."""
        made = tensors_of(result)
        operation = TensorOperation(func, args, kwargs, self._shares)
        if operation.shares:
            if operation.name != "searchsorted":
                operation.wholes = []  # a tensor that is made of a shape, as a mask, does not move the samples it meets
            for tensor in made:
                self._place(tensor, operation)
        if is_draw(func):
            filled = tensors_of(args[:1]) if operation.name == CHOICE else made
            self.draws.append(self._shares.get(filled[0]) if filled else None)

    def _place(self, tensor: Tensor, operation: TensorOperation) -> None:
        first, share = operation.first_share
        found: TensorShare | None = None
        if operation.name not in _LEAVES_IN_PLACE:
            with suppress(ShareError):
                found = follow(operation, tensor)
        elif tensor.dim() == first.dim() and tensor.shape[share.dim] == first.shape[share.dim]:
            found = share
        if found is None:
            self._shares.remove(tensor)
        else:
            self._shares[tensor] = found


class _OrderRun(Run):
    """A run that follows the samples."""

    def __init__(self, traced: TracedModule) -> None:
        super().__init__(traced)
        self.follower = SampleFollower(SMALL, self.input)

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        self.follower.operation(func, args, kwargs, result)


def with_traced_orders(noise: dict[str, Any], draws: Sequence[Draw], traced: TracedModule) -> dict[str, Any]:
    """Returns the facts of a network's draws (`classify`) with the orders that one more run tells, if any is open."""
    if noise.get("doubtful_draw") is None:
        return noise
    run = _OrderRun(traced)
    with run.running():
        run.called()
    # A network that draws another number of times in each pass keeps its doubt.
    return with_orders(noise, draws, run.follower) if len(run.follower.draws) == len(draws) else noise


def with_orders(noise: dict[str, Any], draws: Sequence[Draw], follower: SampleFollower) -> dict[str, Any]:
    """Returns the facts of these draws with their orders, as far as the follower of the same pass knows them."""
    shares: dict[str, list[TensorShare | None]] = defaultdict(list)
    doubtful = None
    for draw, share in zip(draws, follower.draws, strict=True):
        shares[draw.place.module].append(share)
    ordered = []
    for each in noise["draw_dims"]:
        outers = [
            _outer(share, dim, follower.samples) if rows > 1 else 1
            for share, dim, rows in zip(shares[each.module], each.dims, each.rows, strict=True)
        ]
        if None in outers and doubtful is None:
            place = [draw.place for draw in draws if draw.place.module == each.module]
            doubtful = place[outers.index(None)]
        ordered.append(_with_outers(each, [outer or 1 for outer in outers]))
    return {**noise, "draw_dims": tuple(ordered), "doubtful_draw": doubtful}


def _outer(share: TensorShare | None, dim: int, samples: int) -> int | None:
    """Returns how often the samples follow each other along the dim; None if nothing tells."""
    if share is None or share.dim != dim or share.size != samples or share.parts:
        return None
    return share.outer


def _with_outers(draw: DrawDims, outers: Sequence[int]) -> DrawDims:
    return replace(draw, outers=tuple(outers)) if any(outer > 1 for outer in outers) else draw
