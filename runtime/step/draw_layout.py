"""Finds where the samples lie in the draws of a trial, by passes over a batch and over its parts.

Model: a draw with several rows for each sample, as of (samples * positions, width), has them as tracing tells
(compiler/trace/sharding/sample_order.py), or sample by sample, or for one position after another. In the right layout a
pass over a batch gives each sample what a pass over a part of the batch gives it. All draws are tried in one layout,
then in the next; of a few draws each is tried by itself.

Limits: layouts between the two, as (positions * samples * heads), which tracing does not tell. No layout fits them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.program import DrawStep
from dslc.compiler.ir.steps import OUTSIDE, SHARED, DrawDims
from dslc.runtime.technique import sample_draws
from dslc.runtime.technique.sample_pass import ACTIVE, SamplePass

_FEW = 3  # draws of which each is tried in both layouts
_ONE_RANK = {"pipeline": 0, "data": 0, "context": 0, "tensor": 0}, dict.fromkeys(("context", "tensor"), 1)


def find_layout(facts: NetworkFacts, is_right: Callable[[NetworkFacts], bool]) -> NetworkFacts:
    """Returns facts whose draws are laid out as `is_right` finds right; if no layout is, with the reason why the draws
    cannot be given by sample. If a pass fails, returns them as they are.
    """
    for draws in _layouts(facts.draw_dims):
        candidate = replace(facts, draw_dims=draws, doubtful_draw=None)
        try:
            if is_right(candidate):
                return candidate
        except Exception:  # any kind: the user's code may refuse a part of a batch
            return facts
    return replace(
        facts,
        uncontrolled_draw=facts.doubtful_draw or facts.joined_draw or facts.torch_draws,
        uncontrolled_because="a pass over a part of a batch draws other numbers for its samples than a pass over all",
    )


def _layouts(draws: Sequence[DrawDims]) -> Iterator[tuple[DrawDims, ...]]:
    """Yields the draws as they may be laid out: as tracing tells, then the likely layouts first."""
    if any(outer > 1 for draw in draws for outer in draw.outers):
        yield tuple(draws)
    joined = [
        (draw.module, number)
        for draw in draws
        for number, (dim, rows) in enumerate(zip(draw.dims, draw.rows, strict=True))
        if dim != SHARED and rows > 1
    ]
    choices = [(False,) * len(joined), *([(True,) * len(joined)] if joined else [])]
    if len(joined) <= _FEW:
        choices += [choice for choice in itertools.product((False, True), repeat=len(joined)) if len({*choice}) > 1]
    for choice in choices:
        last = {place for place, is_last in zip(joined, choice, strict=True) if is_last}
        yield tuple(
            replace(draw, outers=tuple(rows if (draw.module, n) in last else 1 for n, rows in enumerate(draw.rows)))
            if any(module == draw.module for module, _ in last)
            else replace(draw, outers=())
            for draw in draws
        )


@contextmanager
def drawing_by_sample(
    model: nn.Module,
    facts: NetworkFacts,
    first: int,
    samples: int,
    outside: str = OUTSIDE,
    piece: tuple[int, int] = (0, 1),
) -> Iterator[None]:
    """Lets a copy of a network draw as in a pass over some samples of a batch; and code outside of its modules, by the
    layer `outside`, as with the piece of this number of so many.
    """
    step = DrawStep(kinds=facts.draws, shared=facts.shared_draws, dims=facts.draw_dims)
    sample_draws.apply(step, model, *_ONE_RANK, torch.device("cpu"))
    ACTIVE.samples = SamplePass(seed=0, step=0, first=first, samples=samples)
    ACTIVE.layer = sample_draws.outside_layer(step, outside, piece)
    try:
        yield
    finally:
        ACTIVE.samples = ACTIVE.layer = None


def are_parts(whole: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], tolerance: float) -> bool:
    """True if the outputs of a batch are its parts' outputs, along the dim that goes by samples. A tensor without such
    a dim does not count.
    """
    for tensor, *pieces in zip(whole, *parts, strict=True):
        dims = [
            d
            for d, sizes in enumerate(zip(tensor.shape, *(p.shape for p in pieces), strict=False))
            if len({*sizes}) > 1
        ]
        if len(dims) != 1 or sum(piece.shape[dims[0]] for piece in pieces) != tensor.shape[dims[0]]:
            continue
        joined = torch.cat([*pieces], dims[0])
        scale = float(tensor.abs().nan_to_num().max()) if tensor.numel() else 0.0
        if not torch.allclose(joined, tensor, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
            return False
    return True
