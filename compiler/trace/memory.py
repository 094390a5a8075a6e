"""Working memory of a traced module's layers, beside their saved activations.

Model: the module runs forward and backward without memory, and after each operation the bytes of all live tensors are
recorded; they come and go as in a training. The difference between two runs, per sample, is the part that grows with
the batch; results that do not grow are gradients of weights. Contract: figures follow the conventions of `Working`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dslc.compiler.ir.memory import Working, WorkingSet
from dslc.compiler.trace.batch import LARGE, SMALL
from dslc.compiler.trace.run import Run, storage, tensors_of, total_of

if TYPE_CHECKING:
    from dslc.compiler.trace.private_torch import Operator


class Step(NamedTuple):
    """The state after one operation: the layer, true in the backward pass, live bytes now and when the layer began, and
    the results: (bytes, numbers) of each, and true for a copy in another dtype.
    """

    layer: str
    back: bool
    level: int
    entry: int
    made: tuple[tuple[int, int], ...]
    copies: bool


class Walk(Run):
    """A run that records the live bytes."""

    def __init__(self, *arguments: Any, gradients: bool) -> None:
        super().__init__(*arguments)
        self.steps: list[Step] = []
        self.copied: dict[str, int] = defaultdict(int)  # numbers of weights that autocast copies, and autograd keeps
        self.cast: dict[str, int] = defaultdict(int)  # the most that autocast copies for one operation alone
        self._gradients = gradients
        self._live = self._entry = 0
        self._alive: dict[int, Any] = {}
        self._copies: dict[int, tuple[str, int, Any]] = {}  # of a weight: the layer, its numbers, the copy's memory
        self._weights = {storage(p): p.numel() for p in self.model.parameters()}

    def go(self) -> None:
        import torch

        with torch.set_grad_enabled(self._gradients), self.running():
            output = self.called()
        self._count_copies()
        # The output's gradient is allocated, and the output is freed.
        with self.fake:
            total = total_of([tensor * 1.0 for tensor in tensors_of(output) if tensor.requires_grad])
        del output
        if total is None:
            return
        self.backward(total)
        for parameter in self.model.parameters():
            parameter.grad = None

    def moved(self) -> None:
        super().moved()
        self._entry = self._live

    def operation(self, func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], result: object) -> None:
        from dslc.compiler.trace.private_torch import is_cast, storages_of

        made = []
        for tensor in tensors_of(result):
            key = storage(tensor)
            if key in self.own or key in self._alive:
                continue
            places = storages_of(tensor)
            size = sum(place.nbytes() for place in places)
            made.append((size, tensor.numel()))
            self._live += size
            self._alive[key] = weakref.ref(places[0], self._release_callback(key, size))
        copies = is_cast(func)
        if copies and not self.going_back and self.low:
            self._note_copy(args, result)
        layer = self.of_node(self.steps[-1].layer if self.steps else "") if self.going_back else self.now
        self.steps.append(Step(layer, self.going_back, self._live, self._entry, tuple(made), copies))

    def _note_copy(self, args: Any, result: Any) -> None:
        for tensor, copy in zip(tensors_of(args)[:1], tensors_of(result)[:1], strict=True):
            if (key := storage(tensor)) in self._weights and key not in self._copies:
                self._copies[key] = (self.now, self._weights[key], weakref.ref(copy.untyped_storage()))

    def _count_copies(self) -> None:
        """Counts the copies of weights, once autocast has dropped those that autograd does not keep."""
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


def measure(run: Run, saved: dict[str, int], given: dict[str, int]) -> dict[str, Working]:
    """Returns the working memory of each layer of `run`'s module. `saved` is the activations that each keeps of a
    sample, in order, `given` its inputs. {} if the two runs have different operations.
    """
    walks = []
    for gradients in (True, False):
        for samples in (SMALL, LARGE):
            walk = Walk(run.model, run.cut, run.mode, run.sample, samples, run.low, gradients=gradients)
            walk.go()
            walks.append(walk)
    small, large, idle_small, idle_large = (walk.steps for walk in walks)
    if not _same(small, large) or not _same(idle_small, idle_large):
        return {}
    forward, dropping = _forward(small, large), _forward(idle_small, idle_large)
    backward = _backward(small, large, saved)
    return {
        layer: Working(
            forward=given[layer] + forward[layer],
            dropping=given[layer] + dropping[layer],
            copied=walks[0].copied[layer],
            backward=tuple(backward[layer]),
            cast=walks[0].cast[layer],
        )
        for layer in saved
    }


def _same(small: list[Step], large: list[Step]) -> bool:
    return [(s.layer, s.back, len(s.made)) for s in small] == [(s.layer, s.back, len(s.made)) for s in large]


def _forward(small: list[Step], large: list[Step]) -> dict[str, int]:
    most: dict[str, int] = defaultdict(int)
    for one, other in zip(small, large, strict=True):
        if not one.back:
            grown = (other.level - other.entry - one.level + one.entry) // (LARGE - SMALL)
            most[one.layer] = max(most[one.layer], grown)
    return most


def _backward(small: list[Step], large: list[Step], saved: dict[str, int]) -> dict[str, list[WorkingSet]]:
    earlier, below = 0, {}
    for layer, size in saved.items():
        below[layer] = earlier
        earlier += size
    moments: dict[str, list[WorkingSet]] = defaultdict(list)
    made: dict[str, int] = defaultdict(int)
    for one, other in zip(small, large, strict=True):
        if not one.back:
            continue
        fixed = sum(mine[1] for mine, theirs in zip(one.made, other.made, strict=True) if mine == theirs)
        copies = fixed // 2 if one.copies else 0
        if not one.copies:
            made[one.layer] += fixed
        grown = (other.level - one.level) // (LARGE - SMALL) - below.get(one.layer, 0)
        now = WorkingSet(max(0, grown), fixed, copies, made[one.layer])
        kept = moments[one.layer]
        if not any(moment.exceeds(now) for moment in kept):
            moments[one.layer] = [moment for moment in kept if not now.exceeds(moment)] + [now]
    return moments
