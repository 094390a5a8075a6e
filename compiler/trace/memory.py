"""Working memory of a traced module's layers, beside their saved activations.

Model: the module runs forward and backward without memory, and after each operation the bytes of all live tensors are
recorded; they come and go as in a training. The difference between two runs, per sample, is the part that grows with
the batch; results that do not grow are gradients of weights. Contract: figures follow the conventions of `Working`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dslc.compiler.ir.memory import Halves, Working, WorkingSet, repeated_bytes
from dslc.compiler.ir.tensors import dequantization_bytes
from dslc.compiler.model.float8 import fits, product_moments, stays_in_bf16
from dslc.compiler.trace.batch import LARGE, SMALL
from dslc.compiler.trace.flops import flops_of
from dslc.compiler.trace.private_torch import (
    Argument,
    Arguments,
    Operator,
    Options,
    is_cast,
    next_node_number,
    running_node_number,
    storages_of,
)
from dslc.compiler.trace.run import Run, TracedModule, storage, storage_bytes, tensors_of, total_of
from dslc.dsl.language.calls import Fp8

MemoryReference = weakref.ref[torch.UntypedStorage]


_PRECISION = "float8_precision"  # attribute of a dense layer that multiplies in 8 bits


def mark_float8_layers(model: nn.Module, precision: Fp8) -> None:
    """Lets the walks of a model have the memory of products in 8 bits, in the layers that have them."""
    for name, layer in model.named_modules():
        is_dense = type(layer) is nn.Linear and fits(layer.out_features, layer.in_features)
        if is_dense and not stays_in_bf16(precision, name):
            setattr(layer, _PRECISION, precision)


class Reorders(NamedTuple):
    """Bytes that a CPU takes in the backward pass of a convolution: until the gradient of its input is made, that
    included, and beside all results while the gradient of its weight is made.
    """

    input: int
    weight: int


class Step(NamedTuple):
    """The state after one operation: the layer, true in the backward pass, live bytes now and when the layer began.

    Then the results, (bytes, numbers) of each; true for a copy in another dtype; the bytes of gradients that stay from
    here; the copies of oneDNN in a convolution's backward pass; and the bytes of dequantized weights.
    """

    layer: str
    back: bool
    level: int
    entry: int
    made: tuple[tuple[int, int], ...]
    copies: bool
    stays: int
    reorders: Reorders | None
    dequantized: int  # bytes of frozen weights that are dequantized, now


class Walk(Run):
    """A run that records the live bytes. `first_half`: its backward pass is the first half of a split backward pass.
    This half frees no saved tensor, and keeps the gradients of results of operations with weights.
    """

    def __init__(
        self, traced: TracedModule, samples: int, low: bool, *, gradients: bool = True, first_half: bool = False
    ) -> None:
        super().__init__(traced, samples, low)
        self.steps: list[Step] = []
        self.copied: dict[str, int] = defaultdict(int)  # numbers of weights that autocast copies, and autograd keeps
        self.cast: dict[str, int] = defaultdict(int)  # the most that autocast copies for one operation alone
        self.stays: dict[str, int] = defaultdict(int)  # bytes that a first half keeps, by layer
        self.weighted: dict[str, int] = defaultdict(int)  # operations with weights
        self._gradients, self._first_half = gradients, first_half
        self.passed: dict[str, int] = defaultdict(int)  # the part of them that another layer makes
        self._back: dict[int, str] = {}  # memory that the backward pass makes, with the layer
        self._kept: dict[int, torch.Tensor] = {}
        self._trained_copies: dict[int, MemoryReference] = {}  # of them in 16 bits: the memory of each
        self._live = self._entry = 0
        self._alive: dict[int, MemoryReference] = {}
        self._dequantized: list[MemoryReference] = []
        # Of a weight: the layer, its numbers, the copy's memory.
        self._copies: dict[int, tuple[str, int, MemoryReference]] = {}
        self._weights = {storage(p): p.numel() for p in self.model.parameters()}
        self._float8 = _Float8Products(self.model if low else None)

    def go(self) -> None:
        with torch.set_grad_enabled(self._gradients), self.running():
            output = self.called()
        self._count_copies()
        # The output's gradient is allocated, and the output is freed.
        with self.fake:
            total = total_of([tensor * 1.0 for tensor in tensors_of(output) if tensor.requires_grad])
        del output
        if total is None:
            return
        self.backward(total, retain=self._first_half)
        for parameter in self.model.parameters():
            parameter.grad = None

    def moved(self) -> None:
        super().moved()
        self._entry = self._live

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        copies = is_cast(func)
        if copies and not self.going_back and self._float8.is_copied(args, result):
            return  # torchao makes no 16-bit copy of the weight
        layer = self.of_node(self.steps[-1].layer if self.steps else "") if self.going_back else self.now
        if flops_of(func, args, kwargs, result) is not None:
            for size, fixed in self._float8.moments(args, result, self.samples, back=self.going_back):
                level = self._live + self.samples * size
                self.steps.append(Step(layer, self.going_back, level, self._entry, (), False, 0, None, fixed))
        results = []
        is_dequantization = func.name() == "dslc::dequantize"
        for tensor in tensors_of(result):
            key = storage(tensor)
            if key in self.own or key in self._alive or self._float8.is_copy(key):
                continue
            places = storages_of(tensor)
            size = sum(place.nbytes() for place in places)
            if is_dequantization:  # no gradient of a weight, for which results that do not grow are taken
                self._dequantized = [ref for ref in self._dequantized if ref() is not None]
                self._dequantized.append(weakref.ref(places[0]))
            else:
                results.append((size, tensor.numel()))
            self._live += size
            self._alive[key] = weakref.ref(places[0], self._release_callback(key, size))
        if copies and not self.going_back and self.low:
            self._note_copy(args, result)
        stays = 0
        if self.going_back and self._first_half:
            stays = self._keep_gradients(layer, args)
            self._back |= {key: layer for tensor in tensors_of(result) if (key := storage(tensor)) not in self.own}
        reorders = _reorders(args) if func.name() == "aten::convolution_backward" else None
        dequantized = sum(place.nbytes() for ref in self._dequantized if (place := ref()) is not None)
        if is_dequantization:
            weight: torch.Tensor = tensors_of(result)[0]
            made = dequantization_bytes(str(args[1]), weight.numel(), weight.element_size())
            dequantized += made - storage_bytes(weight)
        if copies and self.going_back:
            dequantized += self._float8.rounded_gradient(result)
        self.steps.append(
            Step(layer, self.going_back, self._live, self._entry, tuple(results), copies, stays, reorders, dequantized)
        )

    def _keep_gradients(self, layer: str, args: object) -> int:
        """Keeps the gradients from which an operation of the backward pass makes others with a weight that trains;
        returns their bytes.
        """
        tensors_given = {storage(tensor): tensor for tensor in tensors_of(args)}
        if not any(map(self._is_trained, tensors_given)):
            return 0
        stays = 0
        self.weighted[layer] += 1
        for key in (tensors_given.keys() & self._back.keys() & self._alive.keys()) - self._kept.keys():
            self._kept[key] = tensors_given[key]
            stays += storage_bytes(tensors_given[key])
            self.passed[layer] += storage_bytes(tensors_given[key]) if self._back[key] != layer else 0
        self.stays[layer] += stays
        return stays

    def _is_trained(self, key: int) -> bool:
        """True if the memory belongs to a parameter that trains, or to its copy in 16 bits."""
        return key in self.trained or (key in self._trained_copies and self._trained_copies[key]() is not None)

    def _note_copy(self, args: object, result: object) -> None:
        for tensor, copy in zip(tensors_of(args)[:1], tensors_of(result)[:1], strict=True):
            if (key := storage(tensor)) in self._weights and key not in self._copies:
                self._copies[key] = (self.now, self._weights[key], weakref.ref(copy.untyped_storage()))
                if key in self.trained:
                    self._trained_copies[storage(copy)] = self._copies[key][2]

    def _count_copies(self) -> None:
        """Counts the copies of weights, once autocast has dropped the copies that autograd does not keep."""
        for layer, numbers, memory in self._copies.values():
            if memory() is not None:
                self.copied[layer] += numbers
            else:
                self.cast[layer] = max(self.cast[layer], numbers)

    def _release_callback(self, key: int, size: int) -> Callable[[object], None]:
        def release(_: object) -> None:
            self._alive.pop(key, None)
            self._live -= size

        return release


class _Float8Products:
    """The products in 8 bits of a model that runs under autocast; without a model there are none."""

    def __init__(self, model: nn.Module | None) -> None:
        layers: list[Any] = (
            [layer for layer in model.modules() if hasattr(layer, _PRECISION)] if model is not None else []
        )
        self._layers = {storage(layer.weight): layer for layer in layers if layer.weight.requires_grad}
        self._shapes = {tuple(layer.weight.shape) for layer in self._layers.values()}
        self._copies: dict[int, nn.Module] = {}  # by the memory of autocast's copy of the weight
        self._alive: list[torch.Tensor] = []  # the copies, so that no memory's identity is used again
        self._of_node: dict[int, tuple[tuple[int, int], ...]] = {}  # moments of a backward pass

    def is_copied(self, args: Arguments, result: object) -> bool:
        """True if a cast is autocast's of the weight of a layer, which is noted."""
        for tensor, copy in zip(tensors_of(args)[:1], tensors_of(result)[:1], strict=True):
            if (layer := self._layers.get(storage(tensor))) is not None:
                self._copies[storage(copy)] = layer
                self._alive.append(copy)
                return True
        return False

    def is_copy(self, key: int) -> bool:
        return key in self._copies

    def moments(self, args: Arguments, result: object, samples: int, *, back: bool) -> tuple[tuple[int, int], ...]:
        """Returns the moments of a product in 8 bits; of a backward pass, which has several, at the first."""
        if back:
            return self._of_node.pop(running_node_number() or -1, ())
        for tensor in tensors_of(args) if self._copies else ():
            layer: Any = self._copies.get(storage(tensor))
            if layer is not None:
                rows = tensors_of(result)[0].numel() // layer.out_features // samples
                precision: Fp8 = getattr(layer, _PRECISION)
                how = {"emulated": precision.emulate, "gathered": precision.all_gather}
                moments = product_moments(rows, layer.in_features, layer.out_features, **how)
                self._of_node[next_node_number() - 1] = moments.backward
                return moments.forward
        return ()

    def rounded_gradient(self, result: object) -> int:
        """Returns the bytes of the 16-bit gradient of a weight, beside which a cast makes that in float32."""
        (tensor,) = tensors_of(result)[:1]
        return 2 * tensor.numel() if tuple(tensor.shape) in self._shapes else 0


def _reorders(args: Sequence[Argument]) -> Reorders | None:
    """Returns the copies of oneDNN (torch 2.13, measured) in a backward pass of a convolution; None if it takes the
    tensors as they are. It gives a result in its own order, which torch copies, if there is a stride and no groups.
    """

    gradient, operand, _, _, stride, _, _, transposed, _, groups, output_mask = args
    last_format = torch.channels_last if operand.dim() == 4 else torch.channels_last_3d
    if operand.dtype == torch.float64 or (operand.dim() > 3 and operand.is_contiguous(memory_format=last_format)):
        return None
    gradient_bytes, size = storage_bytes(gradient), operand.numel() * operand.element_size()
    copied = 2 * size if max(stride) > 1 and groups == 1 and not transposed else max(size, gradient_bytes)
    return Reorders(size + copied if output_mask[0] else 0, size + gradient_bytes if output_mask[1] else 0)


def measure(
    run: Run, saved: dict[str, int], gradient_sizes: dict[str, int], tail: dict[str, int] | None
) -> dict[str, Working]:
    """Returns the working memory of each layer of `run`'s module. `saved` is the activations that each keeps of a
    sample, in order, `tail` those after its last operation with weights, or None if no schedule splits the backward
    pass, `gradient_sizes` its inputs. {} if the two runs have different operations.
    """
    walks = []
    for gradients in (True, False):
        for samples in (SMALL, LARGE):
            walk = Walk(run.traced, samples, run.low, gradients=gradients)
            walk.go()
            walks.append(walk)
    small, large, idle_small, idle_large = (walk.steps for walk in walks)
    if not _same(small, large) or not _same(idle_small, idle_large):
        return {}
    forward, dropping = _forward(small, large), _forward(idle_small, idle_large)
    backward, on_cpu = _backward(small, large, saved)
    dequantizing = _dequantizing(small, large, gradient_sizes)
    halves = {} if tail is None else _halves(run, saved, tail)
    return {
        layer: Working(
            forward=gradient_sizes[layer] + forward[layer],
            dropping=gradient_sizes[layer] + dropping[layer],
            copied=walks[0].copied[layer],
            backward=tuple(backward[layer]),
            cast=walks[0].cast[layer],
            halves=halves.get(layer),
            on_cpu=tuple(on_cpu[layer]),
            dequantizing=tuple(dequantizing[layer]),
        )
        for layer in saved
    }


def _halves(run: Run, saved: dict[str, int], tail: dict[str, int]) -> dict[str, Halves]:
    """Returns the memory of each layer in a backward pass of two halves; {} if two runs have different operations."""
    small, large = (Walk(run.traced, samples, run.low, first_half=True) for samples in (SMALL, LARGE))
    small.go()
    large.go()
    if not _same(small.steps, large.steps):
        return {}
    stays, passed = (
        {layer: (more[layer] - less[layer]) // (LARGE - SMALL) for layer in saved}
        for less, more in ((small.stays, large.stays), (small.passed, large.passed))
    )
    saved_bytes = sum(saved.values())
    first_half: dict[str, int] = defaultdict(int)
    weighted: dict[str, list[tuple[int, int]]] = defaultdict(list)  # operations: the bytes that stay, and weights
    layers: dict[str, int] = {}  # bytes that the layers after one keep, in the order of the backward pass
    for one, large_step in zip(small.steps, large.steps, strict=True):
        if not one.back or one.layer not in saved:
            continue
        staying = layers.setdefault(one.layer, sum(stays[layer] for layer in layers))
        first_half[one.layer] = max(
            first_half[one.layer], (large_step.level - one.level) // (LARGE - SMALL) - saved_bytes - staying
        )
        fixed = 0 if one.copies else _fixed(one, large_step)
        if large_step.stays > one.stays:
            weighted[one.layer].append(((large_step.stays - one.stays) // (LARGE - SMALL), fixed))
        elif fixed and weighted[one.layer]:
            stay, numbers = weighted[one.layer].pop()
            weighted[one.layer].append((stay, numbers + fixed))
    halves = {}
    for layer, size in saved.items():
        most, remaining = repeated_bytes(size, small.weighted[layer], stays[layer])
        halves[layer] = Halves(
            gradients=stays[layer],
            most=most,
            left=remaining,
            copied=small.weighted[layer] * small.copied[layer],
            first=first_half[layer],
            passed=passed[layer],
            tail=tail[layer],
            freed=stays[layer],
            moments=_second_half(weighted[layer][::-1]),
        )
    return halves


def _second_half(weighted: list[tuple[int, int]]) -> tuple[WorkingSet, ...]:
    """Returns the moments in which operations, in forward order, make the gradients of their weights."""
    moments, freed, new_bytes = [], 0, 0
    for stays, numbers in weighted:
        new_bytes += numbers
        moments.append(WorkingSet(freed, numbers, 0, new_bytes))
        freed += stays
    return tuple(moments)


def _fixed(small: Step, large: Step) -> int:
    """Returns the numbers of the results of a step that do not grow with the batch: gradients of weights."""
    return sum(mine[1] for mine, theirs in zip(small.made, large.made, strict=True) if mine == theirs)


def _same(small: list[Step], large: list[Step]) -> bool:
    return [(s.layer, s.back, len(s.made)) for s in small] == [(s.layer, s.back, len(s.made)) for s in large]


def _forward(small: list[Step], large: list[Step]) -> dict[str, int]:
    most: dict[str, int] = defaultdict(int)
    for one, large_step in zip(small, large, strict=True):
        if not one.back:
            grown = (large_step.level - large_step.entry - one.level + one.entry) // (LARGE - SMALL)
            most[one.layer] = max(most[one.layer], grown)
    return most


Moments = dict[str, list[WorkingSet]]


def _dequantizing(small: list[Step], large: list[Step], gradient_sizes: dict[str, int]) -> Moments:
    """Returns the moments of each layer's forward pass in which a dequantized weight exists."""
    moments: Moments = defaultdict(list)
    for one, large_step in zip(small, large, strict=True):
        if one.dequantized and not one.back:
            grown = (large_step.level - large_step.entry - one.level + one.entry) // (LARGE - SMALL)
            size = gradient_sizes.get(one.layer, 0) + grown
            _note(moments[one.layer], WorkingSet(max(0, size), 0, 0, 0, one.dequantized))
    return moments


def _backward(small: list[Step], large: list[Step], saved: dict[str, int]) -> tuple[Moments, Moments]:
    """Returns the moments of each layer's backward pass, and those that CPUs have besides."""
    earlier, below = 0, {}
    for layer, size in saved.items():
        below[layer] = earlier
        earlier += size
    moments: Moments = defaultdict(list)
    on_cpu: Moments = defaultdict(list)
    new_bytes: dict[str, int] = defaultdict(int)
    for one, large_step in zip(small, large, strict=True):
        if not one.back:
            continue
        fixed = _fixed(one, large_step)
        copies = fixed // 2 if one.copies else 0
        bytes_before = new_bytes[one.layer]
        if not one.copies:
            new_bytes[one.layer] += fixed
        grown = (large_step.level - one.level) // (LARGE - SMALL) - below.get(one.layer, 0)
        moment = WorkingSet(max(0, grown), fixed, copies, new_bytes[one.layer], one.dequantized)
        _note(moments[one.layer], moment)
        if one.reorders is None or large_step.reorders is None:
            continue
        results = sum(size for size, _ in large_step.made) - sum(size for size, _ in one.made)
        reordered = (large_step.reorders.input - one.reorders.input - results) // (LARGE - SMALL)
        reordered_weight = (large_step.reorders.weight - one.reorders.weight) // (LARGE - SMALL)
        _note(on_cpu[one.layer], WorkingSet(max(0, grown + reordered), 0, 0, bytes_before))
        _note(on_cpu[one.layer], WorkingSet(max(0, grown + reordered_weight), fixed, 0, new_bytes[one.layer]))
        _note(
            on_cpu[one.layer], WorkingSet(max(0, grown), fixed, fixed, new_bytes[one.layer])
        )  # copied from oneDNN's order
    return moments, on_cpu


def _note(moments: list[WorkingSet], now: WorkingSet) -> None:
    """Adds a moment if no other exceeds it, in place of those that it exceeds."""
    if not any(moment.exceeds(now) for moment in moments):
        moments[:] = [*(moment for moment in moments if not now.exceeds(moment)), now]
