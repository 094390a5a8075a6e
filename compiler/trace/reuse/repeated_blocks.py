"""Finds blocks of a module that are alike, so that the facts of one hold for all.

Model: the module runs forward once, without memory, and each operation is recorded, by block. The record has the
operation, its plain arguments, and the origin of each tensor: the block's input, a parameter of it, an operation of it,
or anything outside. Blocks are alike if their records are the same and

- they have modules of the same classes, with equal attributes, and parameters and buffers of the same shapes. An
  attribute may differ (`layer_idx` does) as long as no forward pass reads it, which is watched (`Unread`);
- each is called once, directly after the block before, and takes that block's output; its other arguments are the same
  object for all blocks, or plain and equal;
- nothing else takes what it makes, it writes into nothing that was there before, and no attribute of the whole module
  changes.

Blocks may repeat one by one, or in groups (one with local attention after each five of another kind). In such a row
each block leaves the same state. So the blocks in the middle can be skipped: `RepeatedBlocks` names them, and the
representative of each.

Contract: the result is a proposal. `block_reuse.py` measures two groups in the middle. It drops the proposal if they
differ in anything, or if an attribute that differs was read. Whatever is not understood here makes a block unlike all
others.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from dslc.compiler.trace.private_torch import Arguments, Operator, Options, TreeSpec
from dslc.compiler.trace.reuse.block_attributes import (
    State,
    Unread,
    by_structure,
    content,
    differences,
    form_of,
    is_tensor,
    values_of,
)
from dslc.compiler.trace.run import Run, TracedModule, storage, tensors_of, written_tensors
from dslc.compiler.trace.structures import UserValue, flatten

LONGEST = 12  # blocks of a group that repeats
BEFORE, AFTER = 3, 1  # groups that are kept before and after those left out


@dataclass(frozen=True)
class Output:
    """The output of a block as a form, and for each leaf the number of the input's leaf, or a plain value."""

    form: TreeSpec
    leaves: tuple[tuple[bool, UserValue], ...]


@dataclass(frozen=True)
class RepeatedBlocks:
    """Blocks that are left out, in order; for each the block that stands for it, and that one's earlier twin, which has
    to have the same facts. `outputs` has, by block, the form of the output: leaves of the input, or plain values.
    """

    stands: Mapping[str, str]
    twins: Mapping[str, str]
    outputs: Mapping[str, Output]
    unread: Unread


def find_repeated_blocks(traced: TracedModule) -> tuple[RepeatedBlocks | None, bool]:
    """Returns the blocks that can be skipped, or None; and whether running the module has changed it, so that it must
    be made again.
    """
    model, cut = traced.model, traced.cut
    groups = by_structure(cut)
    if not groups:
        return None, False
    before = State(model)
    differing = {
        (type(one), name)
        for paths in groups.values()
        for path in paths[1:]
        for one, name in differences(cut.layers[paths[0]], cut.layers[path])
    }
    unread = Unread(differing)
    run = BlockRecorder(traced, {path for paths in groups.values() for path in paths})
    with unread.watched():
        output = run.forward()
    if before.changed(model):
        return None, True
    calls = run.finished(output)
    read = [name for _, name in unread.read]
    structure = {path: key for key, paths in groups.items() for path in paths}
    labels = [
        None if call.strange else (structure[call.path], call.terms, values_of(cut.layers[call.path], read))
        for call in calls
    ]
    found = _repeated(labels, [call.follows for call in calls])
    if found is None:
        return None, False
    first, period, count = found
    stands, twins = {}, {}
    for n in range(first + BEFORE * period, first + (count - AFTER) * period):
        stand = first + (BEFORE - 1) * period + (n - first) % period
        stands[calls[n].path] = calls[stand].path
        twins[calls[stand].path] = calls[stand - period].path
    outputs = {call.path: call.output for call in calls if call.output is not None and call.path in stands}
    return RepeatedBlocks(stands, twins, outputs, Unread(unread.watchable - unread.read)), False


def _repeated(labels: Sequence[Hashable], follows: Sequence[bool]) -> tuple[int, int, int] | None:
    """Returns the first call, the length and the count of the groups that repeat so that most calls can be left out."""
    numbers = _numbered(labels)
    fits = [number is not None and after for number, after in zip(numbers, follows, strict=True)]
    best, most = None, 1
    for period in range(1, LONGEST + 1):
        first = 0
        while first < len(numbers):
            end = first
            while end < len(numbers) and fits[end] and (end < first + period or numbers[end] == numbers[end - period]):
                end += 1
            count = (end - first) // period
            if (left_out := (count - BEFORE - AFTER) * period) > most:
                best, most = (first, period, count), left_out
            first = max(first, end - period) + 1
    return best


def _numbered(labels: Sequence[Hashable]) -> list[int | None]:
    """Returns a number for each label, the same for equal ones; None for none."""
    known: dict[Hashable, int] = {}
    return [None if label is None else known.setdefault(label, len(known)) for label in labels]


@dataclass
class BlockCall:
    """A call of a block. `given` and `made` are its inputs and outputs in terms that are the same for blocks alike."""

    path: str
    follows: bool  # directly after the block before, whose output it takes
    given: Hashable = None
    made: Hashable = None
    output: Output | None = None
    operations: list[Hashable] = field(default_factory=list)
    strange: bool = False  # unlike all others

    @property
    def terms(self) -> Hashable:
        """Returns what happens in it, the same for blocks alike."""
        return self.given, tuple(self.operations), self.made


class BlockRecorder(Run):
    """A run that records the operations of blocks. All tensors stay alive, so that each keeps its identity.

    A call is `strange`, and so like no other, if anything happens in or to the block that the record does not cover.
    The block is called twice; it writes into tensors that it has not made; other code uses what it makes or holds; or
    it receives an object that cannot be compared.
    """

    def __init__(self, traced: TracedModule, blocks: set[str]) -> None:
        super().__init__(traced)
        model, cut = traced.model, traced.cut
        self._blocks = blocks
        self._calls: list[BlockCall] = []
        self._of: dict[str, BlockCall] = {}
        self._alive: list[object] = []
        self._gap = True  # something has happened since the last block
        self._refs: dict[int, tuple[str | int, ...]] = {}  # in the running block: a tensor's place
        self._makers: dict[int, BlockCall] = {}  # of a tensor: the block that made it
        self._results: dict[int, tuple[BlockCall, int]] = {}  # of a tensor: the block whose output it is, and the leaf
        self._last: list[int] = []  # the output of the last block: identities of its leaves
        self._inputs: list[UserValue] = []
        self._known: set[int] = set()  # memory of the running block's own results
        self._owners: dict[int, tuple[str, str]] = {}  # of memory: the block whose parameter or buffer it is, its name
        self._shared: set[int] = set()
        for path in blocks:
            module = cut.layers[path]
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                key = storage(tensor)
                if key in self._owners:
                    self._shared.add(key)
                self._owners[key] = (path, name)
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            owner = self._owners.get(storage(tensor))
            if owner is not None and name != f"{owner[0]}.{owner[1]}":
                self._shared.add(storage(tensor))

    def forward(self) -> object:
        with self.running():
            return self.called()

    def finished(self, output: object) -> list[BlockCall]:
        """Returns the calls in order, after a look at the module's own output."""
        for tensor in tensors_of(output):
            self._used_outside(tensor)
        for key in self._shared:
            self._spoil(self._owners[key][0])
        for n, call in enumerate(self._calls):
            call.strange |= call.made is None
            if n and call.follows and self._calls[n - 1].strange:
                call.follows = False
        return self._calls

    def enter_module(self, path: str, given: object) -> None:
        if path not in self._blocks:
            self._gap = True
            return
        call = BlockCall(path, follows=not self._gap and bool(self._calls))
        if path in self._of:  # called again
            call.strange = self._of[path].strange = True
        self._of.setdefault(path, call)
        self._calls.append(call)
        leaves, form = flatten(given)
        self._alive.append(leaves)
        self._inputs, self._refs, self._known, places = leaves, {}, set(), []
        follows = False
        for n, leaf in enumerate(leaves):
            if not is_tensor(leaf):
                places.append(_plain(leaf, call))
                continue
            self._refs.setdefault(id(leaf), ("input", n))
            earlier = self._results.get(id(leaf))
            chained = earlier is not None and id(leaf) in self._last and len(self._calls) > 1
            follows |= chained
            if earlier is not None and not chained:
                earlier[0].strange = True  # an output that skips a block
            places.append(("before", earlier[1] if earlier else 0, form_of(leaf)) if chained else ("same", id(leaf)))
        call.follows &= follows
        call.given = (str(form), tuple(places))

    def leave_module(self, path: str, output: object) -> None:
        if path not in self._blocks:
            self._gap = True
            return
        call = self._calls[-1]
        leaves, form = flatten(output)
        self._alive.append(leaves)
        made: list[Hashable] = []
        found: list[tuple[bool, UserValue]] = []
        taken: dict[Hashable, int] = {}
        for n, leaf in enumerate(self._inputs):
            if is_tensor(leaf) and (id(leaf) in self._last or not call.follows):
                taken.setdefault(form_of(leaf), n)
        for n, leaf in enumerate(leaves):
            if not is_tensor(leaf):
                made.append(_plain(leaf, call))
                found.append((False, leaf))
                continue
            place = self._refs.get(id(leaf))
            if place is None or place[0] != "operation" or form_of(leaf) not in taken:
                call.strange = True
            made.append((place, form_of(leaf), type(leaf.grad_fn).__name__))
            found.append((True, taken.get(form_of(leaf), 0)))
            self._results[id(leaf)] = (call, n)
        call.made = (str(form), tuple(made))
        call.output = Output(form, tuple(found))
        if sum(1 for tensor, _ in found if tensor) != 1:
            call.strange = True
        self._last, self._gap, self._refs = [id(leaf) for leaf in leaves if is_tensor(leaf)], False, {}

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        self._alive.append((args, kwargs, result))
        inside = self.now in self._blocks and self._calls and self._calls[-1].path == self.now
        if not inside:
            self._gap = True
            for tensor in tensors_of((args, kwargs)):
                self._used_outside(tensor)
            return
        call = self._calls[-1]
        given = (self._encoded(args, call), self._encoded(tuple(kwargs.items()), call))
        number = len(call.operations)
        results = tensors_of(result)
        for n, tensor in enumerate(results):
            if id(tensor) not in self._refs:
                self._refs[id(tensor)] = ("operation", number, n)
                self._makers[id(tensor)] = call
        forms = tuple((form_of(tensor), self._refs[id(tensor)]) for tensor in results)
        call.operations.append((func, given, forms, torch.is_grad_enabled()))
        if any(storage(tensor) not in self._known for tensor in written_tensors(func, args, kwargs)):
            call.strange = True
        self._known |= {storage(tensor) for tensor in results} - self.own

    def _encoded(self, value: object, call: BlockCall) -> Hashable:
        if isinstance(value, tuple | list):
            return tuple(self._encoded(each, call) for each in value)
        if not is_tensor(value):
            return _plain(value, call)
        place = self._refs.get(id(value))
        if place is not None:
            return place
        owner = self._owners.get(storage(value))
        if owner is not None and owner[0] == call.path:
            return ("own", owner[1], form_of(value))
        self._used_outside(value)
        return ("same", id(value))

    def _used_outside(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor is used outside of the block that made it, or holds it; its output may be by what comes
        after the last block.
        """
        key = id(tensor)
        if key in self._results:
            if self._results[key][0] is not self._calls[-1]:
                self._results[key][0].strange = True
        elif key in self._makers:
            self._makers[key].strange = True
        owner = self._owners.get(storage(tensor))
        if owner is not None:
            self._spoil(owner[0])

    def _spoil(self, path: str) -> None:
        if path in self._of:
            self._of[path].strange = True


def _plain(value: object, call: BlockCall) -> Hashable:
    """Returns a value of no tensor so that equal ones compare equal; a block that is given another is strange."""
    found = content(value)
    call.strange |= found is None
    return found
