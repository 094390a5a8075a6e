"""Working memory of a layer, beside its saved activations, by replaying its operations one after another.

Model: an operation takes values and returns one. Forward, a value lives until its last use, or until the end if an
operation keeps it. Backward, the operations run in reverse: the gradient of the result lives while the gradient of the
input is made. Then the former and the operation's saved values are freed. If a value was used twice its gradients meet,
and the later is added to the first. The gradient of a weight is made at the operation that uses it.

Contract: all sizes are bytes of one sample, gradients of weights apart. `backward` has the moments of the backward pass
that no other moment exceeds in every figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dslc.compiler.ir.memory import Halves, LayerMemory, Working, WorkingSet
from dslc.compiler.model.float8 import ProductMoments
from dslc.dsl.language.layers import Conv2d


class Store:
    """A piece of memory: bytes per sample, whether it is already kept for the backward pass, and whether a block that
    may be recomputed keeps it. Who keeps a view keeps what it is a view `of`.
    """

    __slots__ = ("by_block", "bytes", "kept", "of")

    def __init__(self, size: int, is_saved: bool = False) -> None:
        self.bytes = size
        self.kept = is_saved
        self.by_block = False
        self.of: Store | None = None


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """One operation in fp32 or under autocast.

    `constants` are the values that it takes and that need no gradient. `backward`: its result needs one. `adds`: its
    gradient is passed on unchanged. `view`: forward it takes no memory. `passing`: temporary bytes of its
    forward pass, `scratch` of its backward pass; `rounds`: the copies of its weights' gradients. `holds` are other
    values that exist until it is done. `ordered` are more bytes of a backward pass, and `ordered_rounds` more copies,
    if channels are last; `reorders` are the bytes that oneDNN takes if they are not, ahead of the gradient of the input
    and beside the gradient of the weight.
    """

    takes: tuple[Store, ...]
    gives: Store
    kept: tuple[Store, ...] = ()
    weights: int = 0  # numbers of its parameters
    copied: int = 0  # numbers of weights that autocast copies in 16 bits, and keeps
    cast: int = 0  # the same if it does not keep them, as the input needs no gradient
    rearranged: int = 0  # numbers of weights that are copied in another order, and kept
    differentiates: bool = True  # the input needs a gradient
    constants: tuple[Store, ...] = ()
    backward: bool = True
    adds: bool = False
    view: bool = False
    passing: int = 0
    scratch: int = 0
    rounds: int = 0
    holds: tuple[Store, ...] = ()
    ordered: int = 0
    ordered_rounds: int = 0
    reorders: tuple[int, int] = (0, 0)
    float8: ProductMoments | None = None  # of a product in 8 bits


class MemoryRecorder:
    """The memory of a layer in one precision, as its operations are recorded."""

    def __init__(self) -> None:
        self.saved = self.shared = self.full = 0
        self.input: Store | None = None
        self.products = 0  # bytes of results of products and attention
        self.operations: list[Operation] = []
        self._new: list[Store] = []  # kept since the last operation

    def keep(self, store: Store) -> None:
        store = store.of or store
        if not store.kept:
            store.kept = True
            self.saved += store.bytes
            self._new.append(store)
        elif store is self.input and store.by_block:
            self.shared = store.bytes

    def since(self) -> tuple[Store, ...]:
        """Returns what was kept since the last operation, for this one."""
        operations, self._new = tuple(self._new), []
        return operations

    def enter(self, store: Store) -> None:
        """Begins the layer, with this input."""
        self.input = store
        self.full = 0 if store.kept else store.bytes

    def memory(self, output: Store, is_recomputed: bool) -> LayerMemory:
        """Returns the layer's memory, given its output; `is_recomputed`: it is worth recomputing."""
        input_store = self.operations[0].takes[0] if self.operations else None
        assert self.input is not None
        if is_recomputed and self.input.by_block:
            self.shared = self.input.bytes
        if is_recomputed and output is not self.input:
            output.by_block = output.kept
        return LayerMemory(
            saved=self.saved,
            saved_input=sum(store.bytes for op in self.operations for store in op.kept if store is input_store),
            selective=self.full + self.products if is_recomputed else self.saved,
            full=self.full,
            shared=self.shared,
            input=self.input.bytes,
            output=output.bytes,
            working=working(self.operations),
        )


def working(operations: Sequence[Operation]) -> Working:
    """Returns the most that a layer of these operations takes. Equal lists of operations are computed once."""
    if not operations:
        return Working(forward=0, dropping=0, copied=0, backward=())
    shape = _shape(operations)
    known_working = _KNOWN.get(shape)
    if known_working is None:
        known_working = _KNOWN[shape] = Working(
            forward=_forward(operations, keeping=True)[0],
            dropping=_forward(operations, keeping=False)[0],
            dequantizing=_forward(operations, keeping=True)[1],
            copied=sum(op.copied for op in operations),
            cast=max(op.cast for op in operations),
            rearranged=sum(op.rearranged for op in operations),
            **_backward(operations),
            halves=_halves(operations),
        )
    return known_working


_KNOWN: dict[tuple[object, ...], Working] = {}


def _shape(operations: Sequence[Operation]) -> tuple[object, ...]:
    """Returns the key of `working`: each piece of memory by its first use, and its bytes."""
    number_of: dict[int, int] = {}

    def place(store: Store) -> tuple[int, int]:
        return number_of.setdefault(id(store), len(number_of)), store.bytes

    return tuple(
        (
            *map(place, op.takes), place(op.gives), *map(place, op.kept), len(op.takes), op.weights, op.copied,
            op.differentiates, op.adds, op.view, op.passing, op.scratch, op.rounds, op.cast, op.backward,
            op.rearranged, op.ordered, op.ordered_rounds, op.reorders, op.float8,
            *map(place, op.constants), len(op.kept), *map(place, op.holds),
        )
        for op in operations
    )  # fmt: skip


def _forward(operations: Sequence[Operation], *, keeping: bool) -> tuple[int, tuple[WorkingSet, ...]]:
    """Returns the most bytes of a forward pass, and the moments that have bytes besides the samples'."""
    moments = list[WorkingSet]()
    last_use = {id(store): n for n, op in enumerate(operations) for store in (*op.takes, *op.holds)}
    entered = operations[0].takes[0]
    views = {id(op.gives) for op in operations if op.view}
    for n, op in enumerate(operations):
        for store in op.takes:
            if store.of is not None:
                last_use[id(store.of)] = max(n, last_use.get(id(store.of), 0))
    last_use[id(entered)] = len(operations)  # the caller holds its input
    live: dict[int, int] = {}
    saved: dict[int, int] = {}
    most = 0
    for n, op in enumerate(operations):
        for store in (*op.takes, op.gives):
            if id(store) not in saved and id(store) not in views:
                live[id(store)] = store.bytes
        if keeping:
            for store in op.kept:
                live.pop(id(store), None)
                saved[id(store)] = store.bytes
        size = sum(live.values()) + sum(saved.values())
        most = max(most, size + op.passing)
        for sample_bytes, fixed in op.float8.forward if op.float8 is not None else ():
            moments.append(WorkingSet(size - op.gives.bytes + sample_bytes, 0, 0, 0, fixed))
        live = {key: size for key, size in live.items() if last_use.get(key, n) > n}
    return most, tuple(moments)


def _backward(operations: Sequence[Operation]) -> dict[str, tuple[WorkingSet, ...]]:
    """Returns the moments of a backward pass, by the names that `Working` has for them."""
    saved, weights = sum(store.bytes for op in operations for store in op.kept), 0
    gradients: dict[int, list[int]] = {id(operations[-1].gives): [operations[-1].gives.bytes]}  # shared where passed on
    moments: dict[str, list[WorkingSet]] = {"backward": [], "on_cpu": [], "channels_last": []}

    def note(kind: str, now: WorkingSet) -> None:
        if not any(other_moment.exceeds(now) for other_moment in moments[kind]):
            moments[kind] = [*(other_moment for other_moment in moments[kind] if not now.exceeds(other_moment)), now]

    for op in reversed(operations):
        if not op.backward:
            continue
        own_gradients = gradients.pop(id(op.gives), [op.gives.bytes])
        before = saved + sum({id(g): g[0] for g in (own_gradients, *gradients.values())}.values())
        new_gradients = []
        for store in op.takes:
            if not op.differentiates or store is op.gives or store in op.constants:
                continue
            gradient = own_gradients if op.adds and store.bytes == own_gradients[0] else [store.bytes]
            if id(store) in gradients:
                new_gradients.append(gradient)  # for a moment beside the one to which it is added
            else:
                gradients[id(store)] = gradient
        if op.gives in op.takes:
            gradients[id(op.gives)] = own_gradients
        sizes = {id(g): g[0] for g in (own_gradients, *new_gradients, *gradients.values())}
        weights_before, weights = weights, weights + op.weights
        size = saved + sum(sizes.values()) + op.scratch
        rounded = 0
        if op.float8 is not None:
            rounded = 2 * op.weights  # the gradient in 16 bits, which under autocast alone replaces the weight's copy
            for sample_bytes, fixed in op.float8.backward:
                note("backward", WorkingSet(before + sample_bytes, 0, 0, weights_before, fixed))
        note("backward", WorkingSet(size, op.weights, op.rounds * op.weights, weights, rounded))
        if op.ordered or op.ordered_rounds:
            copies = (op.rounds + op.ordered_rounds) * op.weights
            note("channels_last", WorkingSet(size + op.ordered, op.weights, copies, weights))
        reordered, scratch = op.reorders
        if reordered and op.differentiates:
            note("on_cpu", WorkingSet(size + reordered, 0, 0, weights_before))
        if scratch and op.weights:
            note("on_cpu", WorkingSet(size + scratch, op.weights, 0, weights))
            note("on_cpu", WorkingSet(size, op.weights, op.weights, weights))  # copied from oneDNN's order
        saved -= sum(store.bytes for store in op.kept)
    return {kind: tuple(kind_moments) for kind, kind_moments in moments.items()}


def _halves(operations: Sequence[Operation]) -> Halves:
    entered = operations[0].takes[0]  # it exists already

    def kept_bytes(op: Operation) -> int:
        return sum(store.bytes for store in op.kept if store is not entered)

    weighted = [op for op in operations if op.weights]
    unweighted = sum(kept_bytes(op) for op in operations if not op.weights)
    gradients_kept = unweighted + sum(map(kept_bytes, weighted))
    released = most = copied = freed = weights = 0
    moments = []
    for n, op in enumerate(weighted):
        rest = weighted[n:]
        most = max(most, n * (unweighted + sum(map(kept_bytes, rest))) + gradients_kept - released)
        copied = max(copied, n * sum(later.copied for later in rest) + sum(later.copied for later in weighted))
        released += op.gives.bytes
        weights += op.weights
        moments.append(WorkingSet(freed, op.weights, op.rounds * op.weights, weights))
        freed += op.gives.bytes + kept_bytes(op)
    last_weighted = max((n for n, op in enumerate(operations) if op.weights), default=-1)
    first_half, gradients, passed = _first_half(operations)
    return Halves(
        gradients=gradients,
        most=most,
        left=len(weighted) * unweighted - released,
        copied=copied,
        first=first_half,
        passed=passed,
        tail=sum(map(kept_bytes, operations[last_weighted + 1 :])),
        freed=freed,
        moments=tuple(moments),
    )


def _first_half(operations: Sequence[Operation]) -> tuple[int, int, int]:
    """Returns the most bytes of gradients in a first half, the bytes that stay, and whether the output's gradient
    stays.
    """
    output = [operations[-1].gives.bytes]
    gradients: dict[int, list[int]] = {id(operations[-1].gives): output}  # shared where passed on
    stays: dict[int, list[int]] = {}
    most = 0
    for op in reversed(operations):
        if not op.backward:
            continue
        own_gradients = gradients.pop(id(op.gives), [op.gives.bytes])
        new_gradients = []
        if op.weights:
            stays[id(own_gradients)] = own_gradients
        for store in op.takes:
            if not op.differentiates or store is op.gives or store in op.constants:
                continue
            gradient = own_gradients if op.adds and store.bytes == own_gradients[0] else [store.bytes]
            if id(store) in gradients:
                new_gradients.append(gradient)
                if id(gradients[id(store)]) in stays:  # a sum beside a gradient that stays
                    gradients[id(store)] = [store.bytes]
                    new_gradients.append(gradients[id(store)])
            else:
                gradients[id(store)] = gradient
        if op.gives in op.takes:
            gradients[id(op.gives)] = own_gradients
        sizes = {id(g): g[0] for g in (own_gradients, *new_gradients, *gradients.values(), *stays.values())}
        most = max(most, sum(sizes.values()) + op.scratch)
    return most, sum(g[0] for g in stays.values()), output[0] if id(output) in stays else 0


def reorders(conv: Conv2d, operand: Store, result: Store) -> tuple[int, int]:
    """Returns the bytes that oneDNN copies in the backward pass of a convolution (compiler/trace/memory.py)."""
    size = operand.bytes
    copied = 2 * size if conv.stride > 1 and conv.groups == 1 else max(size, result.bytes)
    return copied, size + result.bytes
