"""Memory of one layer in a job, in bytes: what it keeps and what it works in, by itself.

Model: a layer has figures for float32 and under autocast (`LayerMemory`), and the job's precision picks one of the two.
Under O2 all computations have 16 bits, and take half of what they do in float32. Contract: arithmetic over one layer of
the model graph; the account (compiler/cost/account.py) walks a step over these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

from dslc.compiler.ir.memory import Halves, LayerMemory, Working, WorkingSet, repeated_bytes
from dslc.compiler.ir.nodes import LayerNode, ModelGraph
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.ir.tensors import DTYPE_BYTES
from dslc.compiler.placement.sharding import autocasts, compiles_loss, low_copy, low_precision, recomputed
from dslc.compiler.placement.staging import Staging
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.record import Record, record


@record
class LayerBytes(Record):
    """One layer of a micro-batch: saved activations, and working memory forward, in recomputation and backward."""

    kept: int
    forward: int
    again: int  # 0 if nothing is recomputed
    backward: tuple[WorkingSet, ...]
    copies: int  # of weights: autocast's, or those in another order
    input: int
    output: int
    unkept: int = 0  # of its input, which no layer keeps; known where no choice of recomputation changes it


def _memory(job: JobSpec, layer: LayerNode) -> LayerMemory:
    """Returns the layer's memory in the job's precision; under O2 the memory in float32, which `_scale` halves."""
    return layer.autocast if autocasts(job) else layer.float32


def _scale(job: JobSpec) -> float:
    return 0.5 if low_copy(job) else 1.0


class Recomputation(NamedTuple):
    """Two facts about recomputation: is a layer recomputed, and is the layer before it?"""

    layer: bool = False
    before: bool = False


def recomputation(job: JobSpec, model: ModelGraph) -> dict[str, Recomputation]:
    names = set(recomputed(job, model))
    entry = {layer.name: Recomputation(layer.name in names) for layer in model.layers[:1]}
    return entry | {
        layer.name: Recomputation(layer.name in names, previous.name in names)
        for previous, layer in pairwise(model.layers)
    }


def kept_bytes(job: JobSpec, model: ModelGraph, layers: Sequence[LayerNode]) -> list[int]:
    """Returns the bytes that each layer keeps for the backward pass, of one sample."""
    by_layer = recomputation(job, model)
    return [saved_bytes(job, layer, by_layer[layer.name]) for layer in layers]


def saved_bytes(job: JobSpec, layer: LayerNode, recompute: Recomputation) -> int:
    """Returns the bytes that one layer keeps for the backward pass, of one sample."""
    memory = _memory(job, layer)
    if not has_backward(job, layer):
        return 0
    if not recompute.layer:
        size = memory.saved
    elif job.memory.recompute == "selective":
        size = memory.selective
    else:
        size = _full(layer, memory)
    size += memory.shared if recompute.before else 0
    return size // 2 if low_copy(job) else size


def saved_input_bytes(job: JobSpec, layer: LayerNode, recompute: Recomputation) -> int:
    memory = _memory(job, layer)
    if not has_backward(job, layer):
        return 0
    size = _full(layer, memory) if recompute.layer else memory.saved_input
    size += memory.shared if recompute.before else 0
    return size // 2 if low_copy(job) else size


def _full(layer: LayerNode, memory: LayerMemory) -> int:
    return layer.input.bytes if memory.full is None else memory.full


def has_backward(job: JobSpec, layer: LayerNode) -> bool:
    """True if a gradient reaches the layer: it has a parameter that trains, or one comes before it."""
    working = _memory(job, layer).working
    return working is None or bool(working.backward)


def sent_bytes(job: JobSpec, model: ModelGraph, layer: int) -> int:
    """Returns the bytes that a stage ending with this layer sends, of one sample on a rank: all tensors that cross the
    cut. An upper bound for a traced module: a layer may keep some of them too.
    """
    if layer + 1 == len(model.layers):
        return prod(model.shared_output or model.output.shape) * (2 if low_precision(job) else 4)
    if model.traced is not None:
        return sum(fact.bytes for fact in model.traced.seams[layer].sent)
    node = model.of_a_rank[layer]
    return node.output.bytes // (2 if low_precision(job) and (node.low or low_copy(job)) else 1)


def layer_bytes(
    job: JobSpec, layer: LayerNode, recompute: Recomputation, samples: float, *, on_cpu: bool, channels_last: bool
) -> LayerBytes:
    work = _working(job, layer)
    besides = work.channels_last if channels_last else work.on_cpu if on_cpu else ()
    sizes = _without_masks(job, layer, recompute, samples, besides)
    if not layer.masks:
        return sizes
    masks = layer.masks * (2 if low_precision(job) else 4)
    return replace(
        sizes,
        kept=sizes.kept + (masks if sizes.backward and not recompute.layer else 0),
        forward=sizes.forward + masks,
        again=sizes.again + masks if sizes.again else 0,
        backward=tuple(replace(moment, bytes=moment.bytes + masks) for moment in sizes.backward),
    )


def copy_bytes(job: JobSpec, layer: LayerNode) -> int:
    """Returns the bytes of copies of weights, whatever the samples: autocast's, or those in another order."""
    work = _working(job, layer)
    if autocasts(job):
        return 2 * work.copied
    return (2 if low_copy(job) else 4) * work.rearranged if work.backward else 0


def _without_masks(
    job: JobSpec, layer: LayerNode, recompute: Recomputation, samples: float, besides: tuple[WorkingSet, ...]
) -> LayerBytes:
    work, factor, memory = _working(job, layer), samples * _scale(job), _memory(job, layer)
    shared = memory.shared if recompute.before else 0
    moments = tuple(
        WorkingSet(int(factor * (m.bytes + shared)), m.weights, m.copies, m.made, m.dequantized)
        for m in (*work.backward, *(besides if work.backward else ()))
    )
    saved = int(samples * saved_bytes(job, layer, recompute))
    dequantizing = max((int(factor * m.bytes) + m.dequantized for m in work.dequantizing), default=0)
    forward = max(int(factor * work.forward), dequantizing)
    input, output = (int(factor * size) for size in _ends(layer, memory))
    if not moments:  # under `no_grad`, in effect
        forward = int(factor * work.dropping) + (2 * work.cast if autocasts(job) else 0)
        forward = max(forward, dequantizing)
        ends = {"input": input, "output": output, "unkept": int(factor * _full(layer, memory))}
        return LayerBytes(kept=0, forward=forward, again=0, backward=(), copies=copy_bytes(job, layer), **ends)
    kept_input = int(samples * saved_input_bytes(job, layer, recompute))
    unkept = int(factor * _full(layer, memory)) - kept_input if job.memory.recompute == "none" else 0
    earlier = input - int(factor * (_full(layer, memory) + shared))  # the part of its input that other layers keep
    return LayerBytes(
        kept=saved,
        forward=max(int(factor * work.dropping), saved + output, dequantizing) if recompute.layer else forward,
        again=forward + output - max(0, earlier) if recompute.layer else 0,
        backward=moments,
        copies=copy_bytes(job, layer),
        input=input,
        output=output,
        unkept=max(0, unkept),
    )


def _ends(layer: LayerNode, memory: LayerMemory) -> tuple[int, int]:
    """Returns the bytes of one sample of what the layer takes and returns."""
    input = layer.input.bytes if memory.input is None else memory.input
    return input, layer.output.bytes if memory.output is None else memory.output


def _working(job: JobSpec, layer: LayerNode) -> Working:
    memory = _memory(job, layer)
    return memory.working or _unknown(layer, memory.saved, autocasts(job))


def _unknown(layer: LayerNode, saved: int, autocast: bool) -> Working:
    """Estimates a layer of unknown operations: its output is made beside its saved tensors, and two gradients."""
    ends = layer.input.bytes + layer.output.bytes
    most, numbers = max((q.count for q in layer.parameters), default=0), sum(q.count for q in layer.parameters)
    return Working(
        forward=saved + layer.output.bytes,
        dropping=ends,
        copied=_copied(layer) if autocast else 0,
        backward=(WorkingSet(saved + ends, most, 0, numbers),),
    )


def _copied(layer: LayerNode) -> int:
    """Returns the numbers of weights that autocast copies, of a layer whose operations are unknown."""
    return sum(q.count for q in layer.parameters if len(q.shape) > 1)


def halves_bytes(job: JobSpec, layer: LayerNode, samples: float) -> Halves:
    """Returns the layer's bytes for `samples` samples if a schedule splits the backward pass: all in bytes."""
    memory, factor = _memory(job, layer), samples * _scale(job)
    halves = (memory.working and memory.working.halves) or _unknown_halves(layer, memory.saved)
    copied = 2 * halves.copied if autocasts(job) else 0
    return Halves(
        gradients=int(factor * halves.gradients),
        most=int(factor * halves.most) + copied,
        left=int(factor * halves.left),
        copied=copied,
        first=int(factor * halves.first),
        passed=int(factor * halves.passed),
        tail=int(factor * halves.tail),
        freed=int(factor * halves.freed),
        moments=tuple(WorkingSet(int(factor * m.bytes), m.weights, m.copies, m.made) for m in halves.moments),
    )


def _unknown_halves(layer: LayerNode, saved: int) -> Halves:
    """Estimates a layer whose operations are unknown, by the figures of a transformer block."""
    modules = len({q.name.rpartition(".")[0] for q in layer.parameters})
    gradients = int(0.7 * saved)
    most, remaining = repeated_bytes(saved, modules, gradients)
    numbers = [q.count for q in layer.parameters]
    return Halves(
        gradients=gradients,
        most=most,
        left=remaining,
        copied=modules * _copied(layer),
        first=gradients + 2 * layer.input.bytes,
        passed=0,
        tail=0 if layer.parameters else saved,
        freed=gradients,
        moments=(WorkingSet(0, max(numbers), 0, sum(numbers)),) if numbers else (),
    )


def buffer_bytes(layer: LayerNode) -> int:
    return sum(DTYPE_BYTES[b.dtype] * prod(b.shape) for b in layer.buffers)


def loss_bytes(job: JobSpec, model: ModelGraph) -> tuple[int, int, int]:
    """Returns (forward, kept, backward) of the loss beside the model's activations, of one sample.

    Cross entropy makes log-probabilities in float32 beside the output, keeps them, and returns their gradient and the
    output's; over shares of the classes torch makes two more, one forward and one backward. An elementwise loss makes
    one value, and one gradient, for each number. A compiled one keeps the output, and makes its gradient alone.
    """
    numbers, low = prod(model.shared_output or model.output.shape), low_precision(job)
    output = (2 if low else 4) * numbers
    if compiles_loss(job, cut=bool(model.shared)):
        return output, output, 2 * output
    wide = 4 * numbers if low else 0  # the output again, in float32
    if model.shared_output and model.shared_output != model.output.shape:
        return output + wide + 8 * numbers, 4 * numbers, 4 * numbers + 12 * numbers
    if isinstance(job.model.loss, c.CrossEntropy | c.PythonLoss | PreferenceLoss):
        return output + wide + 4 * numbers, 4 * numbers, 4 * numbers + 8 * numbers
    return output + wide + 4 * numbers, wide or output, (wide or output) + 4 * numbers + (output if low else 0)


def loss_kept_bytes(job: JobSpec, model: ModelGraph) -> int:
    """Returns the bytes that the loss of one sample keeps for its backward pass beside the model's output."""
    if compiles_loss(job, cut=bool(model.shared)):
        return 0
    keeps = low_precision(job) or isinstance(job.model.loss, c.CrossEntropy | c.PythonLoss | PreferenceLoss)
    return 4 * prod(model.shared_output or model.output.shape) if keeps else 0


def symmetric_bytes(staging: Staging, layers: Sequence[LayerNode], samples: float) -> int:
    """Returns the bytes of symmetric memory of a rank with these layers (`parallelism.async_tensor`).

    Torch (2.13, torch/distributed/_symmetric_memory) allocates one workspace for the group, outside of its allocator,
    which grows to the largest need. A gather before a product needs this rank's piece
    (`_pipelined_multi_all_gather_and_consume`). A product before a scatter needs two pieces of its result
    (`_pipelined_produce_and_all2all`); the backward pass has one where the forward pass has the other.
    """
    job, cuts = staging.job, staging.cuts
    if not job.parallelism.async_tensor:
        return 0
    most = 0
    for part in (part for layer in layers if layer.recomputable for part in layer.parts):  # of compiled blocks
        styles = cuts.by_module.get(part.name, ())
        if TensorStyle.COLUMN_OF_PIECES in styles:
            most = max(most, prod(part.takes))
        if TensorStyle.ROW_TO_PIECES in styles:
            most = max(most, prod(part.gives))
    element = 2 if low_precision(job) or low_copy(job) else 4
    return 2 * element * int(samples * most) // staging.layout.sizes["tensor"]
