"""Records what the blocks of a module do in a forward pass, in terms that are the same for blocks that do the same.

Model: an operation is its function, its plain arguments, and the origin of each tensor: the block's input, one of its
parameters, an operation of it, or anything outside, by identity.

Contract: a call is `strange`, and so like no other, if anything happens in or to the block that these terms do not
cover. The block is called twice; it writes into tensors that it has not made; other code uses what it makes or holds;
or it receives an object that cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dslc.compiler.trace.batch import SMALL, Example
from dslc.compiler.trace.cut import ModuleCut
from dslc.compiler.trace.reuse.block_attributes import content, form_of, is_tensor
from dslc.compiler.trace.run import Run, storage, tensors_of

if TYPE_CHECKING:
    from torch import nn

    from dslc.compiler.ir.tensors import TensorFact
    from dslc.compiler.trace.private_torch import FakeTensorMode, Operator


@dataclass(frozen=True)
class Output:
    """The output of a block as a form, and for each leaf the number of the input's leaf, or a plain value."""

    form: Any
    leaves: tuple[tuple[bool, Any], ...]


@dataclass
class BlockCall:
    """A call of a block. `given` and `made` are its inputs and outputs in terms that are the same for blocks alike."""

    path: str
    follows: bool  # directly after the block before, whose output it takes
    given: Any = None
    made: Any = None
    output: Any = None
    operations: list[Any] = field(default_factory=list)
    strange: bool = False  # unlike all others

    @property
    def terms(self) -> Any:
        """Returns what happens in it, the same for blocks alike."""
        return self.given, tuple(self.operations), self.made


class BlockRecorder(Run):
    """A run that records the operations of blocks. All tensors stay alive, so that each keeps its identity."""

    def __init__(
        self, model: nn.Module, cut: ModuleCut, fake: FakeTensorMode, input: TensorFact | Example, blocks: set[str]
    ) -> None:
        super().__init__(model, cut, fake, input, SMALL)
        self._blocks = blocks
        self._calls: list[BlockCall] = []
        self._of: dict[str, BlockCall] = {}
        self._alive: list[Any] = []
        self._gap = True  # something has happened since the last block
        self._refs: dict[int, Any] = {}  # in the running block: a tensor's place
        self._makers: dict[int, BlockCall] = {}  # of a tensor: the block that made it
        self._results: dict[int, tuple[BlockCall, int]] = {}  # of a tensor: the block whose output it is, and the leaf
        self._last: list[int] = []  # the output of the last block: identities of its leaves
        self._inputs: list[Any] = []
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

    def forward(self) -> Any:
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
        from dslc.compiler.trace.structures import flatten

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
        from dslc.compiler.trace.structures import flatten

        if path not in self._blocks:
            self._gap = True
            return
        call = self._calls[-1]
        leaves, form = flatten(output)
        self._alive.append(leaves)
        made: list[Any] = []
        found: list[tuple[bool, Any]] = []
        taken: dict[Any, int] = {}
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

    def operation(self, func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], result: object) -> None:
        import torch

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
        self._look_for_writing(func, args, kwargs, call)
        self._known |= {storage(tensor) for tensor in results} - self.own

    def _look_for_writing(self, func: Operator, args: Any, kwargs: Mapping[str, Any], call: BlockCall) -> None:
        from dslc.compiler.trace.private_torch import schema_of

        for n, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[n] if n < len(args) else kwargs.get(argument.name)
                if any(storage(tensor) not in self._known for tensor in tensors_of(given)):
                    call.strange = True

    def _encoded(self, value: Any, call: BlockCall) -> Any:
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

    def _used_outside(self, tensor: Any) -> None:
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


def _plain(value: Any, call: BlockCall) -> Any:
    """Returns a value of no tensor so that equal ones compare equal; a block that is given another is strange."""
    found = content(value)
    call.strange |= found is None
    return found
