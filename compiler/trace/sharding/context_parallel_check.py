"""Proves, without numbers, that a module on pieces of sequences computes the same as on whole ones.

Model: on a context axis of `ranks` ranks each rank has one of `ranks` equal pieces of every sequence. Attention by
`torch.nn.functional.scaled_dot_product_attention` is replaced by attention over the keys and values of all pieces
(runtime/parallel/context_parallel.py). The module is run without memory (run.py) on the piece of each rank, and on the
whole. In the whole run the piece of a tensor is followed through the operations from the input on (propagation.py); an
operation that works across the positions, or is not known, is refused. The runs on pieces must do the same operations
in the same order, with the same numbers. Their tensors must have the same shapes, except for the length of the piece.

Constants, which follow from no parameter and not from the input (positions, masks), are computed. A constant is a
piece, or the same on all ranks, if its numbers are. Any other constant, as positions that each rank counts from 0, may
decide what the module does. It is refused where it meets other tensors. A module whose `forward` takes `position_ids`
receives the positions of the piece. It must do the same, with the same constants, when it is given the whole and no
positions, as in one process.

All of this holds in training and in evaluation. The ranks have all parameters, and add up the gradients of their
pieces: the check needs no gradients.

Limits: as in all tracing, one path. Attention that was imported by name before, and is not called as a function of
`torch.nn.functional`, is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dslc.compiler.ir.module_facts import AttentionFacts, ModelFacts, PieceFacts
from dslc.compiler.ir.network_facts import NetworkFacts
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.trace.batch import SMALL, Example, batch_names, length_of, piece_of, without_numbers
from dslc.compiler.trace.code_place import line_at, line_of
from dslc.compiler.trace.private_torch import (
    Arguments,
    DataDependentOutputException,
    DynamicOutputShapeException,
    Operator,
    Options,
    number_of,
    schema_of,
    tree_map_only,
    unset_fake_temporarily,
)
from dslc.compiler.trace.run import TensorMap, TracedModule, storage, tensors_of
from dslc.compiler.trace.sharding.context_records import (
    ATTENDS,
    DIFFERS,
    MIXES,
    PLACES,
    POSITIONS,
    ConstantResult,
    ContextParallelError,
    TraceRecords,
    at_line,
    because,
    piece_among,
    same_pieces,
    same_positions,
)
from dslc.compiler.trace.sharding.cut_draws import cut_draws
from dslc.compiler.trace.sharding.propagation import ShareError, TensorOperation, TensorShare, follow, sums_positions
from dslc.compiler.trace.sharding.share_run import SAME, VIEWS, ShareRun, numbers_of, operation_name, place_text
from dslc.compiler.trace.structures import UserValue, named

Asked = Callable[[Callable[["torch.Tensor"], bool]], AbstractContextManager[None]]
Buffers = Mapping[str, "torch.Tensor"]
Loss = Callable[..., "tuple[torch.Tensor, int | torch.Tensor]"]  # a sum, and the number of its parts

_MOST = 1 << 24  # numbers of a constant that is computed
_SCALES = ("neg", "_to_copy", "squeeze", "unsqueeze", "mean", "sum")  # a number stays what it is
_OF_COUNTS = ("clamp", "clamp_min", "maximum", "eq", "ne", "gt")
_TAKE_POSITIONS = f"a `forward` that takes `{POSITIONS}`, which dslc then gives it"


def with_pieces(
    facts: ModelFacts,
    traced: TracedModule,
    ranks: int,
    asked: Asked,
    buffers: Callable[[], Buffers],
    loss: Loss | None = None,
) -> ModelFacts:
    """Returns the facts of a module without memory on a context axis of `ranks` ranks.

    `loss`, of an output and a target, is a loss that counts by itself: the sum of its pieces is followed, too. `asked`
    makes libraries read constants whose numbers are known, as they do in a training. `buffers` returns the numbers of
    buffers; it is called only if they are needed.
    """
    model, input = traced.model, traced.input
    length = length_of(input)
    if length == 0 or length % ranks:
        return facts  # the rules report it
    takes = POSITIONS in inspect.signature(model.forward).parameters
    if isinstance(input, Example):
        takes = takes and POSITIONS not in batch_names(input.input(SMALL))
    try:
        found: dict[bool, PieceFacts] = {}
        known: Buffers = {}
        for training in (True, False):
            runs = _Runs(traced, ranks, takes, training, asked, loss, facts.network)
            try:
                found[training] = runs.compare(known)
            except ContextParallelError as fault:
                if fault.code != PLACES or known or not any(not b.is_floating_point() for b in model.buffers()):
                    raise
                known = buffers()
                found[training] = runs.compare(known)
    except ContextParallelError as fault:
        return replace(
            facts, pieces=PieceFacts(ranks=ranks, code=fault.code, fault=fault.text, help=fault.help, positions=takes)
        )
    attention = found[True].attention or found[False].attention
    return replace(facts, pieces=replace(found[True], attention=attention))


@dataclass(frozen=True)
class _Runs:
    """The runs of a module in one mode, and their comparison. `takes`: its `forward` takes positions."""

    traced: TracedModule
    ranks: int
    takes: bool
    training: bool
    asked: Asked
    loss: Loss | None
    network: NetworkFacts | None

    def compare(self, buffers: Buffers) -> PieceFacts:
        """Returns the calls of attention, and the draws. Raises `ContextParallelError`."""
        length = length_of(self.traced.input)
        own = length // self.ranks
        places = [range(n * own, (n + 1) * own) for n in range(self.ranks)]
        runs = [self._run(piece_of(self.traced.input, place.start, own), buffers, None) for place in places]
        pieces = [self._records(run, place) for run, place in zip(runs, places, strict=True)]
        whole = self._run(self.traced.input, buffers, pieces)
        told = self._records(whole, range(length))
        if told.failed:
            raise ContextParallelError(DIFFERS, f"it fails when it is given `{POSITIONS}`: {told.failed}")
        for rank, piece in enumerate(pieces):
            same_pieces(told, piece, self.ranks, rank)
        if whole.number is not None and sum(run.number or 0 for run in runs) != whole.number:
            raise ContextParallelError(
                MIXES,
                "its loss is a mean, and does not say of which positions",
                '`own(mean_of = "labels")`, or a loss that is (sum, count)',
            )
        if self.takes:
            plain = self._run(self.traced.input, buffers, None)
            same_positions(plain.go(None, self.training, self.asked), told)
        return PieceFacts(
            ranks=self.ranks,
            positions=self.takes,
            attention=tuple(whole.calls),
            draws=cut_draws(told.records, self.network),
        )

    def _run(
        self, input: TensorFact | Example, buffers: Buffers, pieces: Sequence[TraceRecords] | None
    ) -> _SequenceRun:
        return _SequenceRun(replace(self.traced, input=input), buffers, pieces or (), self.loss)

    def _records(self, run: _SequenceRun, positions: range) -> TraceRecords:
        return run.go(positions if self.takes else None, self.training, self.asked)


class _SequenceRun(ShareRun):
    """A run on whole sequences or on a piece. With `pieces`, the runs on these, pieces are followed."""

    def __init__(
        self, traced: TracedModule, buffers: Buffers, pieces: Sequence[TraceRecords], loss: Loss | None
    ) -> None:
        super().__init__(traced)
        self.calls: list[AttentionFacts] = []
        self.told = TraceRecords(self.records)
        self._pieces, self._loss, self._length = pieces, loss, length_of(traced.input)
        given = traced.input
        self._target = without_numbers(given.target(SMALL), traced.mode) if isinstance(given, Example) else None
        self._sums = TensorMap[None]()  # numbers that are sums or means over the positions
        self.number: int | None = None  # of what the loss is a sum of, if it follows from shapes alone
        self._values: TensorMap[torch.Tensor] = TensorMap()  # of constants
        self._of_memory: dict[int, list[torch.Tensor]] = defaultdict(list)  # the constants, by memory
        self._astray = TensorMap[ContextParallelError]()  # constants that are neither pieces nor alike
        self._attending = False
        for name, buffer in self.model.named_buffers():
            if name in buffers:
                self._know(buffer, buffers[name])
        if self._pieces:
            for tensor in tensors_of((self.input, self._target)):
                self.shares[tensor] = TensorShare(1, 1, self._length)

    def go(self, positions: range | None, training: bool, asked: Asked) -> TraceRecords:
        """Runs the module, and returns the operations that it ran; a run on a piece may fail."""

        given: dict[str, torch.Tensor] = {}
        before = [(module, module.training) for module in self.model.modules()]
        self.model.train(training)
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            if positions is not None:
                numbers = torch.arange(positions.start, positions.stop)[None]
                with self.fake:
                    given[POSITIONS] = torch.empty(numbers.shape, dtype=torch.int64)
                self._know(given[POSITIONS], numbers)
                self._judge(0, ConstantResult(name=POSITIONS, where="", values=[numbers]), [given[POSITIONS]])
                self.told.constants.append(ConstantResult(name=POSITIONS, where="", values=[numbers]))
            with self.hooked(), asked(lambda tensor: tensor in self._values), torch.set_grad_enabled(training):
                output = self.called(**given)
                sums = self._sums_of_loss(output)
            if self._pieces:
                self._check_output(output)
                self._check_sums(sums)
            self.number = next((each for each in sums if isinstance(each, int)), None)
        except _no_numbers():
            raise
        except Exception as error:  # any kind: it comes out of the user's own code
            self.told.failed = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
            self.told.where = line_of(error)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, mode in before:
                module.training = mode
        return self.told

    def _check_output(self, output: object) -> None:
        for place, tensor in named(output).items():
            share = self.shares.get(tensor)
            of_positions = share is not None and (share.dim, share.outer, share.size) == (1, 1, self._length)
            if not of_positions and tensor not in self._sums:
                part = f"`{place}` of its output" if place else "its output"
                raise ContextParallelError(MIXES, f"{part} is not one for each position", "use the data axis")

    def _sums_of_loss(self, output: object) -> Sequence[object]:
        if self._loss is None:
            return ()
        try:
            return self._loss(output, self._target)
        except _no_numbers() as error:
            if isinstance(error, ContextParallelError):
                raise
            reason = f"the loss reads numbers out of tensors{_line_suffix(line_of(error))}, as `losses[mask]` does"
            raise ContextParallelError(
                MIXES, reason, "`losses.masked_fill(~mask, 0).sum()`, which has the same sum"
            ) from error

    def _check_sums(self, sums: Sequence[object]) -> None:
        for each, what in zip(sums, ("loss", "number of its losses"), strict=False):
            if not isinstance(each, int) and each not in self._sums:
                raise ContextParallelError(MIXES, f"its {what} is no sum over the positions", "use the data axis")

    # ---------------------------------------------------------------------------------------------- watching

    @contextmanager
    def hooked(self) -> Iterator[None]:
        attention = F.scaled_dot_product_attention
        with super().hooked():
            F.scaled_dot_product_attention = self._attention(attention)
            try:
                yield
            finally:
                F.scaled_dot_product_attention = attention

    def run_operation(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        if func is number_of and (value := self._values.get(args[0])) is not None:
            with unset_fake_temporarily():
                return value.item()
        result = func(*args, **kwargs)
        if not self._attending:
            self.operation(func, args, kwargs, result)
        return result

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        name = operation_name(func)
        if schema_of(func).is_mutable:
            for tensor in given:
                for constant in self._of_memory.pop(storage(tensor), ()):
                    self._values.remove(constant)
        elif made and self._computed(func, name, args, kwargs, given, made):
            return
        if self._pieces:
            self._follow(func, name, args, kwargs, given, made)
        self._note(name, given, made, numbers_of(args, kwargs))

    def _follow(
        self,
        func: Operator,
        name: str,
        args: Arguments,
        kwargs: Options,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        astray = next((fault for tensor in given if (fault := self._astray.get(tensor))), None)
        if astray is not None:
            raise astray
        if any(tensor in self._sums for tensor in given):
            self._follow_sum(name, given, made)
            return
        if not any(tensor in self.shares for tensor in given):
            return
        operation = TensorOperation(func, args, kwargs, self.shares)
        if self._loss is not None and sums_positions(operation, made):
            self._note_sums(made)
            return
        try:
            for tensor in made:
                share = follow(operation, tensor)
                if share is not None:
                    self.shares[tensor] = share
        except ShareError as refused:
            where = self._current_place()
            if name.startswith("_scaled_dot_product"):
                raise ContextParallelError(
                    ATTENDS,
                    f"{where}: attention that is not called as `torch.nn.functional.scaled_dot_product_attention` "
                    "cannot be given the keys of other pieces",
                    "`import torch.nn.functional as F` and `F.scaled_dot_product_attention(…)`",
                ) from None
            if operation.pointwise and any(self._length in tensor.shape for tensor in operation.wholes):
                raise ContextParallelError(
                    PLACES,
                    f"{where}: `{name}` combines a rank's piece with a tensor of all {self._length} positions",
                    _TAKE_POSITIONS,
                ) from None
            raise ContextParallelError(MIXES, f"{where}: {refused.text}", "use the data axis") from None

    def _follow_sum(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Follows a number that is a sum or a mean over the positions: it may be scaled, added to others, and divided
        by a count. Raises `ContextParallelError` for anything else.
        """
        sums = [tensor for tensor in given if tensor in self._sums]
        losses = [tensor for tensor in sums if tensor.requires_grad]
        fits = not any(tensor in self.shares for tensor in given) and (
            name in (*SAME, *VIEWS, *_SCALES)
            or (name in ("add", "sub", "add_", "sub_") and bool(sums))
            or (name in ("mul", "mul_") and len(losses) < 2)
            or (name in ("div", "div_") and not any(tensor is given[-1] for tensor in losses))
            or (name in _OF_COUNTS and not losses)
        )
        if not fits:
            raise ContextParallelError(
                MIXES,
                f"{self._current_place()}: `{name}` of a number that all positions make is another on a rank's piece",
                "use the data axis",
            )
        self._note_sums(made)

    def _note_sums(self, made: list[torch.Tensor]) -> None:
        self._sums.fill(made, None)

    def _attention(self, attention: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def called(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attn_mask: torch.Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> torch.Tensor:
            given = [query, key, value]
            if self._pieces:
                self._check_attention(given, attn_mask, is_causal)
            self._attending = True
            try:
                made: torch.Tensor = attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            finally:
                self._attending = False
            if self._pieces and query in self.shares:
                self.shares[made] = TensorShare(made.dim() - 2, 1, self._length)
            self._note("attention", given, [made], (repr((dropout_p, is_causal, scale, enable_gqa)),))
            return made

        return called

    def _check_attention(self, given: list[torch.Tensor], mask: torch.Tensor | None, causal: bool) -> None:
        shares, where = [self.shares.get(tensor) for tensor in given], self._current_place()
        if not any(shares) and (mask is None or mask not in self.shares):
            raise ContextParallelError(
                ATTENDS, f"{where}: attention among tensors that every rank has whole", "use the data axis"
            )
        if any(s != TensorShare(t.dim() - 2, 1, self._length) for t, s in zip(given, shares, strict=True)):
            raise ContextParallelError(
                ATTENDS, f"{where}: attention whose queries, keys and values are not all of the sequence's positions"
            )
        if mask is not None:
            raise ContextParallelError(
                ATTENDS,
                f"{where}: attention is given a mask, of which a rank has no piece",
                "attention without a mask, or with `is_causal = True`",
            )
        key, value = given[1:]
        self.calls.append(
            AttentionFacts(
                module=self.module,
                layer=self.now,
                length=self._length,
                numbers=(key.numel() + value.numel()) // SMALL,
                causal=causal,
            )
        )

    # --------------------------------------------------------------------------------------------- constants

    def _computed(
        self,
        func: Operator,
        name: str,
        args: Arguments,
        kwargs: Options,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> bool:
        """True if the operation works on constants alone; their numbers are computed."""

        if any(tensor not in self._values and not _is_real(tensor) for tensor in given):
            return False
        if torch.Tag.nondeterministic_seeded in func.tags or sum(t.numel() for t in made) > _MOST:
            return False
        if name.startswith(("empty", "new_empty")):
            return False

        def real(value: UserValue) -> UserValue:
            swapped = tree_map_only(torch.Tensor, self._value_of, value)
            return tree_map_only(torch.device, lambda device: torch.device("cpu"), swapped)

        with unset_fake_temporarily(), torch.no_grad():
            values = tensors_of(func(*real(args), **real(kwargs)))
        constant = ConstantResult(name=name, where=_line(), values=values)
        for tensor, value in zip(made, values, strict=True):
            self._know(tensor, value)
        cause = next((fault for tensor in given if (fault := self._astray.get(tensor))), None)
        self._judge(len(self.told.constants), constant, made, cause)
        self.told.constants.append(constant)
        return True

    def _judge(
        self, number: int, constant: ConstantResult, made: list[torch.Tensor], cause: ContextParallelError | None = None
    ) -> None:
        """Finds out whether constants of the whole are pieces or alike on the ranks, by the constants of the runs on
        pieces. `cause` is the fault of a constant that they follow from.
        """

        for n, tensor in enumerate(made):
            others = []
            for piece in self._pieces:
                if number >= len(piece.constants) or piece.constants[number].name != constant.name:
                    where = piece.where if number >= len(piece.constants) and piece.failed else constant.where
                    raise ContextParallelError(
                        DIFFERS, f"{at_line(where)} does something else on a piece{because(piece)}"
                    )
                others.append(piece.constants[number].values[n])
            with unset_fake_temporarily():
                found = piece_among(constant.values[n], others)
            if isinstance(found, TensorShare):
                self.shares[tensor] = found
            elif others and not found:
                self._astray[tensor] = cause or ContextParallelError(
                    PLACES,
                    f"{at_line(constant.where)}: `{constant.name}` makes numbers that on a piece are others than in "
                    "one process, such as positions that are counted from 0",
                    _TAKE_POSITIONS,
                )

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self._values.get(tensor)
        return tensor if value is None else value

    def _know(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        self._values[tensor] = value
        self._of_memory[storage(tensor)].append(tensor)

    def _note(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor], numbers: tuple[str, ...]) -> None:
        values = [(n, self._values.get(tensor)) for n, tensor in enumerate(given)]
        constants = tuple((n, value) for n, value in values if value is not None)
        self.record(name, given, made, numbers, line=_line(), constants=constants)

    def _current_place(self) -> str:
        return place_text(self.module, _line())


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and getattr(tensor, "fake_mode", None) is None


def _no_numbers() -> tuple[type[Exception], ...]:
    """Returns the exceptions that are no failures of the module's."""

    return ContextParallelError, DataDependentOutputException, DynamicOutputShapeException


def _line() -> str:
    """Returns the running line of the network's code."""
    return line_at(sys._getframe(1))


def _line_suffix(line: str) -> str:
    return f" ({line})" if line else ""
