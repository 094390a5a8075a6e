"""Dense layers that multiply in 8 bits: which layers of a network they are, and the memory of their products.

Model: `precision = fp8(…)` converts torch's own dense layers whose weight trains and whose dims are multiples of 16,
torchao's rule for the hardware. A head that computes the loss in chunks stays in 16 bits. torchao (0.18,
float8_linear.py) saves the 16-bit input and the float32 weight, and casts both again in the backward pass: nothing is
saved in 8 bits, and autocast's copy of the weight is not made. A cast takes float32 copies of the tensor beside the 8
bits. An emulated product takes float32 copies of both factors.

Contract: `product_moments` follows the order of torchao's operations without torch.compile, which fuses casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import NamedTuple

from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.parameter_names import targeted
from dslc.compiler.ir.steps import Float8Step
from dslc.compiler.placement.losses import head_of, wants_chunks
from dslc.compiler.placement.sharding import trained
from dslc.dsl.language.calls import Fp8
from dslc.dsl.language.job import JobSpec

MULTIPLE = 16  # of both dims of a weight, for the products of GPUs
SKIPPED = "as `skip` asks"


class DenseLayer(NamedTuple):
    """A dense layer of torch's own, by its name, with the dims of its weight."""

    name: str
    rows: int
    columns: int


def dense_layers(model: ModelGraph) -> Iterator[DenseLayer]:
    """Yields the dense layers of a network, in order."""
    if model.traced is not None:
        yield from (DenseLayer(name, *shape) for name, shape in model.traced.dense)
        return
    for layer in model.layers:
        for part in layer.parts:
            if part.kind == "linear":
                yield DenseLayer(part.name, part.gives[-1], part.takes[-1])


def float8_step(job: JobSpec, model: ModelGraph | None) -> Float8Step | None:
    """Returns the layers of a network that multiply in 8 bits; None if the job asks for none."""
    precision = job.train.precision
    if not isinstance(precision, Fp8):
        return None
    step = Float8Step(recipe=precision.recipe, emulated=precision.emulate, layers=None)  # type: ignore[arg-type]
    if model is None:
        return step
    names, others = [], []
    head = head_of(model) if wants_chunks(job) else None
    training = {name for first in trained(job, model) for name in model.names.all_names(first)}
    for layer in dense_layers(model):
        reason = _reason(precision, layer)
        if not reason and f"{layer.name}.weight" not in training:
            reason = "its weight is frozen"
        if not reason and head is not None and head.name == layer.name:
            reason = "it computes the loss in chunks"
        if reason:
            others.append((layer.name, reason))
        else:
            names.append(layer.name)
    tied = {name for pair in model.ties for name in pair}
    gathered = [name for name in names if f"{name}.weight" not in tied] if precision.all_gather else []
    return replace(step, layers=tuple(names), others=tuple(others), gathered=tuple(gathered))


def gathered_weights(job: JobSpec, model: ModelGraph) -> frozenset[str]:
    """Returns the weights that `fully_shard` gathers in 8 bits. A weight that other modules use too is not among
    them."""
    step = float8_step(job, model)
    return frozenset(f"{name}.weight" for name in step.gathered) if step is not None else frozenset()


def _reason(precision: Fp8, layer: DenseLayer) -> str:
    """Returns why a layer stays in 16 bits, as far as its name and shape tell; "" if nothing does."""
    if stays_in_bf16(precision, layer.name):
        return SKIPPED
    if not fits(layer.rows, layer.columns):
        return f"{layer.rows:,} x {layer.columns:,} is no multiple of {MULTIPLE}"
    return ""


def fits(rows: int, columns: int) -> bool:
    """True if products with a weight of these dims can be in 8 bits."""
    return rows % MULTIPLE == columns % MULTIPLE == 0


def stays_in_bf16(precision: Fp8, name: str) -> bool:
    """True if `skip` names a layer, or a module that it is in."""
    is_named, parts = targeted(precision.skip), name.split(".")
    return any(is_named(".".join(parts[:length])) for length in range(1, len(parts) + 1))


def float8_flops(job: JobSpec, model: ModelGraph) -> dict[str, int]:
    """Returns the FLOPs of a rank's products in 8 bits of a sample's forward pass, by the layer that they are in."""
    step, flops = float8_step(job, model), dict[str, int]()
    names = frozenset(step.layers or ()) if step is not None else frozenset[str]()
    of_a_rank = {layer.name: layer for layer in model.of_a_rank}
    numbers = {q.name: q.count for layer in model.of_a_rank for q in layer.parameters}
    for name, _, _ in dense_layers(model) if names else ():
        layer = model.layer_of(name) if name in names else None
        if layer is not None:
            work = 2 * prod(layer.input.shape[:-1]) * numbers[f"{name}.weight"]
            flops[layer.name] = min(of_a_rank[layer.name].forward_flops, flops.get(layer.name, 0) + work)
    return flops


# ---------------------------------------------------------------------------------------------------------- memory


class ProductMoments(NamedTuple):
    """Moments of a product in 8 bits: bytes of each sample, and bytes that do not grow with the batch. Forward, beside
    the saved input; backward, beside the gradient of the result.
    """

    forward: tuple[tuple[int, int], ...]
    backward: tuple[tuple[int, int], ...]


def product_moments(rows: int, inputs: int, outputs: int, *, emulated: bool, gathered: bool) -> ProductMoments:
    """Returns the moments of `rows` rows of a sample times a weight of `outputs` x `inputs` numbers. `gathered`: the
    weight has 8 bits when it is gathered, and is not cast.
    """
    x, y, w = rows * inputs, rows * outputs, inputs * outputs
    cast = 9  # bytes a number: float32, scaled and clamped, and the 8 bits
    if gathered:
        return _moments_of_gathered(x, y, w, emulated=emulated)
    if not emulated:
        return ProductMoments(
            forward=((cast * x, 0), (x, cast * w), (x + 4 * y, w)),
            backward=(
                (cast * y, 0),
                (y, cast * w),
                (y + 2 * x, 2 * w),
                ((1 + cast) * y + 2 * x, w),
                (2 * y + (2 + cast) * x, w),
                (3 * y + 4 * x, w + 2 * w),
            ),
        )
    # torchao copies 8-bit factors into the order of GPUs, the weight, and then the gradient and the input.
    held = 3 * y + 4 * x  # both casts of the gradient, the gradient of the input in 16 bits, the input, and copies
    return ProductMoments(
        forward=((cast * x, w), (5 * x, cast * w), (5 * x + 4 * y, 5 * w), (x + 6 * y, w)),
        backward=(
            (cast * y, w),
            (5 * y, (1 + cast) * w),
            (5 * y + 4 * x, 6 * w),
            (y + 6 * x, 2 * w),
            ((1 + cast) * y + 2 * x, w),
            (2 * y + (2 + cast) * x, w),
            (held + 8 * y, w),
            (held + 4 * y + 8 * x, w),
            (held + 4 * y + 4 * x, 5 * w),
            (held, 7 * w),
        ),
    )


def _moments_of_gathered(x: int, y: int, w: int, *, emulated: bool) -> ProductMoments:
    """Returns the same for a weight that is gathered in 8 bits, of `w` numbers, and `x` and `y` of a sample."""
    cast = 9
    if not emulated:
        return ProductMoments(
            forward=((cast * x, 0), (x + 4 * y, 0)),
            backward=(
                (cast * y, 0),
                (y + 2 * x, w),
                ((1 + cast) * y + 2 * x, 0),
                (2 * y + (2 + cast) * x, 0),
                (3 * y + 4 * x, 2 * w),
            ),
        )
    held = 3 * y + 4 * x
    return ProductMoments(
        forward=((cast * x, 0), (5 * x + 4 * y, 4 * w), (x + 6 * y, 0)),
        backward=(
            (cast * y, 0),
            (5 * y + 4 * x, 5 * w),
            (y + 6 * x, w),
            ((1 + cast) * y + 2 * x, 0),
            (2 * y + (2 + cast) * x, 0),
            (held + 8 * y, 0),
            (held + 4 * y + 8 * x, 0),
            (held + 4 * y + 4 * x, 4 * w),
            (held, 6 * w),
        ),
    )
