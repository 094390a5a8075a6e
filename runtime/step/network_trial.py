"""Tries a network on real samples in this process, and tells what its forward passes depend on and change.

Model: each pass runs on a copy of the network, with the same state of every random generator that dslc seeds. Passes
over equal shapes draw equal numbers, so only their samples can make a difference:

    training     a batch, five times; the second call of one copy; each sample beside itself alone; a part of the batch
    evaluation   the batch; each sample beside itself alone; a part of the batch

A batch is [a, b, c], a sample beside itself [b, b, b], and a part [a, b]. If the output for a sample changes, the
network mixes samples. Batch norms of torch do not count: they use fixed statistics here, because the runtime
synchronises them. Where a path varies, `PATHS` more passes with other random numbers or samples tell which of them it
skips. A loss that the network returns is a sum over samples if f(a, b) + f(b, a) = f(a, a) + f(b, b). This holds also
where the numbers drawn for a row depend on its position. Of a square of a mean the two sides differ by (a - b)^2.

Limits: a path that no pass takes is not seen. A batch whose tensors do not begin with the samples is not taken apart.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.network_facts import (
    GENERATOR,
    ITERATOR,
    NUMBER,
    TENSORS,
    UNSEEDED,
    AttributeFacts,
    CodePlace,
    NetworkFacts,
)
from dslc.compiler.ir.program import LossStep
from dslc.compiler.trace.code_place import (
    HostDraws,
    generator_state,
    has_attribute,
    held_values,
    is_generator,
    names_of,
    place_of,
    restored_generators,
    set_inner_value,
)
from dslc.compiler.trace.draws import is_draw
from dslc.compiler.trace.private_torch import AnyBatchNorm, Arguments, OperationMode, Operator, Options
from dslc.compiler.trace.structures import call, flatten, map_tensors, tensors
from dslc.runtime.data.samples import Pair
from dslc.runtime.model.custom_losses import OwnSum
from dslc.runtime.parallel.unused_parameters import leaves
from dslc.runtime.process import random_numbers
from dslc.runtime.step.draw_layout import are_parts, drawing_by_sample, find_layout
from dslc.runtime.technique.batch_norm import derived_norm

ROWS = 3  # samples of a batch
_JUMPS = (2, 3, 10, 1_000, 1_000_000)  # calls after which a number that counts them is tried
_SEED = 20_086  # by which no shuffle of 2 or 3 samples leaves one where it is
PATHS = 16  # passes with other random numbers, where a path varies
_ROUNDING = 1e-5  # of float32, between losses of as many samples
_REPEATS = 4  # passes over equal samples, before a difference is said to come from other samples


@dataclass(frozen=True)
class ForwardPass:
    outputs: list[Tensor]
    used: frozenset[str]
    loss: tuple[float, float]  # sum and number, of a loss that the network returns
    buffers: dict[str, Tensor]  # and the parameters that a pass writes
    drew: bool  # true if it drew torch's random numbers


_ODD_SIZES = (5, 7)  # numbers of samples in the passes that look for a place


@dataclass
class NetworkTrial:
    """A network that is tried with a `batch` of `ROWS` samples, or of two; `loss` is of one that returns it."""

    make: Callable[[], nn.Module]
    batch: Pair
    loss: LossStep | None = None
    reads: bool = False
    model: nn.Module = field(init=False)
    unsteady: bool = field(init=False, default=False)  # equal passes differ, by something that nothing seeds
    _written: tuple[str, ...] = field(init=False, default=())  # parameters that a pass writes
    _late: tuple[CodePlace, HostDraws] | None = field(init=False, default=None)  # draws that begin in a later pass

    def __post_init__(self) -> None:
        with random_numbers.preserve_generators():
            self.model = self._make_network()
        sizes = {each.shape[0] if each.dim() else 0 for each in tensors(self.batch)}
        leaves_ = flatten(self.batch)[0]
        self.rows = sizes.pop() if len(sizes) == 1 and all(isinstance(leaf, Tensor) for leaf in leaves_) else 0

    def result(self, facts: NetworkFacts) -> NetworkFacts:
        """Returns the facts of tracing with the facts of the trial. Raises as the network does."""
        with random_numbers.preserve_generators():
            self._written = facts.written
            facts = self._training(facts)
            if self.rows > 1:
                one = self._pass(self._fresh(), self.batch, training=False)
                others = self._sample_passes(one, training=False)
                facts = replace(facts, mixes_evaluation=self._mixing(one, others, training=False))
                if one.drew:
                    facts = replace(facts, evaluation_draw=self._place_of_evaluation_draw())
                if self.loss is not None and facts.repeats:
                    facts = replace(facts, loss_mixes=self._loss_mixes())
            if self.unsteady and facts.host_draws is None:
                facts = replace(facts, host_draws=self._place_of_difference(), draws_from=UNSEEDED)
            if self.reads or facts.varies:
                facts = replace(facts, skipped_norms=self._skipped_norms())
            if self.rows > 1 and facts.draws and facts.uncontrolled_draw is None and facts.mixes is None:
                facts = find_layout(facts, self._draws_by_sample)
        return replace(facts, tried=True)

    # ------------------------------------------------------------------------------------------------ one pass

    def _make_network(self) -> nn.Module:
        random_numbers.seed_host(_SEED)
        return with_fixed_statistics(_without_zeros(self.make()))

    def _fresh(self) -> nn.Module:
        """Returns a copy of the network as it was made: a pass may change its parameters, too."""
        try:
            return copy.deepcopy(self.model)
        except Exception:  # any kind: an attribute that cannot be copied; the network is made anew
            return self._make_network()

    def _pass(
        self,
        model: nn.Module,
        batch: Pair,
        *,
        training: bool = True,
        seed: int = _SEED,
    ) -> ForwardPass:
        model.train(training)
        with_fixed_statistics(model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        random_numbers.seed_host(seed)
        before = torch.get_rng_state()
        with torch.set_grad_enabled(training):
            output = call(model, model.forward, batch[0])
        drew = not torch.equal(before, torch.get_rng_state())
        outputs = [each for each in tensors(output) if each.is_floating_point()]
        used = {names.get(leaf, "") for each in outputs if each.requires_grad for leaf in leaves(each)}
        total = number = 0.0
        if self.loss is not None:
            counted = OwnSum(self.loss).count_losses(output, batch[1])
            total, number = float(counted.total.detach()), float(counted.number)
        buffers = {name: tensor.detach().clone() for name, tensor in self._state(model).items()}
        return ForwardPass([each.detach() for each in outputs], frozenset(used), (total, number), buffers, drew)

    def _rows_of(self, rows: Sequence[int]) -> Pair:
        input, target = self.batch
        chosen = map_tensors(lambda each: each[list(rows)], input)
        return chosen, chosen if target is input else map_tensors(lambda each: each[list(rows)], target)

    # ------------------------------------------------------------------------------------------------ training

    def _training(self, facts: NetworkFacts) -> NetworkFacts:
        first = self._fresh()
        before = _attributes(first)
        draws = HostDraws(first)
        random_numbers.seed_host(_SEED)
        with draws.watch():
            one = self._pass(first, self.batch)
        if draws.source and facts.host_draws is None:
            place = self._place_of_draw()
            facts = replace(facts, host_draws=place, draws_from=draws.source, draws_globally=draws.is_global)
        after = _attributes(first)
        held = {name: value for name, value in after.items() if not _equal(before.get(name), value)}
        carried = {name: _copied(value) for name, value in held_values(first) if name in held}
        passes = [one, self._pass(self._fresh(), self.batch)]
        repeats = draws.is_seeded and _passes_agree(*passes) and self._repeats(one, training=True, times=3)
        variables = any(not has_attribute(first, name) for name in held)  # which no copy puts back
        self.unsteady = not (repeats or variables or draws.source)
        if not self.unsteady:
            self._restore_buffers(first)
            passes.append(self._pass(first, self.batch))
            names = self._influential(passes, before, held, carried, draws)
            facts = replace(facts, attributes=tuple(self._attribute(name, held.get(name)) for name in names))
        others = self._sample_passes(one, training=True) if repeats and self.rows > 1 else []
        moved, counted = self._buffers(one, others)
        if repeats:
            self._count_further(one, passes, counted)
        facts = replace(facts, repeats=repeats, paths_differ=len({each.used for each in passes}) > 1)
        if self._late is not None and facts.host_draws is None:
            place, late = self._late
            facts = replace(facts, host_draws=place, draws_from=late.source, draws_globally=late.is_global)
        facts = replace(facts, written_by_samples=tuple(name for name in moved if name in self._written))
        moved, counted = (tuple(name for name in names if name not in self._written) for names in (moved, counted))
        return replace(facts, moved=moved, counted=counted, mixes=self._mixing(one, others, training=True))

    def _state(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the buffers, and the parameters that a forward pass writes."""
        parameters = dict(model.named_parameters()) if self._written else {}
        written = {name: parameters[name].detach() for name in self._written if name in parameters}
        return dict(model.named_buffers()) | written

    def _place_of_draw(self, values: Mapping[str, object] = MappingProxyType({})) -> CodePlace:
        model = self._with_values(values)
        random_numbers.seed_host(_SEED)
        with HostDraws(model).line_of() as places:
            self._pass(model, self.batch)
        return places[0] if places else CodePlace(module="", kind=type(model).__name__)

    def _place_of_evaluation_draw(self) -> CodePlace:
        model = self._fresh()
        names = names_of(model)
        places: list[CodePlace] = []

        def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
            if is_draw(func):
                places.append(place_of(sys._getframe(1), names, model))
            return func(*args, **kwargs)

        with OperationMode(run_operation):
            self._pass(model, self.batch, training=False)
        return places[0] if places else CodePlace(module="", kind=type(model).__name__)

    def _place_of_difference(self) -> CodePlace:
        """Returns the place at which two passes over the same samples begin to differ."""
        rows = list(range(self.rows))
        for _ in range(2 * _REPEATS if rows else 0):
            place = self._locate(rows, rows, 1e-5, training=True)
            if place is not None:
                return place
        return CodePlace(module="", kind=type(self.model).__name__)

    def _repeats(self, one: ForwardPass, *, training: bool, times: int) -> bool:
        """True if some more passes over the whole batch are like one."""
        return all(_passes_agree(one, self._pass(self._fresh(), self.batch, training=training)) for _ in range(times))

    def _skipped_norms(self) -> tuple[str, ...]:
        """Returns the batch norms that passes with other random numbers, or other samples, do not call alike."""
        counts: list[Counter[str]] = []
        chosen = [self.batch, *(self._rows_of([row] * self.rows) for row in range(self.rows))]
        with restored_generators(self.model) as restore:
            for number in range(PATHS):
                restore()
                # Made anew, so that a generator which the constructor seeds by the system is another one.
                model = self._make_network() if number == 1 else self._fresh()
                calls = _count_calls(model)
                if not calls:
                    return ()
                self._pass(model, chosen[number % len(chosen)] if self.reads else self.batch, seed=_SEED + number)
                counts.append(calls)
        return tuple(name for name in counts[0] if len({each[name] for each in counts}) > 1)

    def _restore_buffers(self, model: nn.Module) -> None:
        first = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in first and first[name].shape == buffer.shape and not _equal(first[name], buffer):
                    buffer.copy_(first[name])  # that of an expanded one would fail

    def _influential(
        self,
        passes: list[ForwardPass],
        before: Mapping[str, object],
        held: Mapping[str, object],
        carried: Mapping[str, object],
        draws: HostDraws,
    ) -> list[str]:
        """Returns the attributes that a pass changed and that others depend on; adds to `passes`, two of fresh copies
        and one again.
        """
        if draws.holder in held or not draws.is_seeded:
            return [draws.holder] if draws.holder in held else []  # no two passes are alike
        if not (_passes_agree(passes[0], passes[1]) and _passes_agree(passes[0], passes[2])):
            alone = [name for name in held if not self._stays_with({name: carried[name]}, passes)]
            return alone or _iterators(self.model) or list(held)
        counters = {
            name: (start, end)
            for name, end in held.items()
            if isinstance(end, int | float) and isinstance(start := before.get(name), int | float)
        }
        for jump in _JUMPS:
            later = {name: start + jump * (end - start) for name, (start, end) in counters.items()}
            if later and (not self._stays_with(later, passes) or self._late is not None):
                return list(counters)
        return []

    def _stays_with(self, values: Mapping[str, object], passes: list[ForwardPass]) -> bool:
        """True if a pass of a copy with these attributes is like the first pass."""
        passes.append(self._pass_later(values))
        return _passes_agree(passes[0], passes[-1])

    def _pass_later(self, values: Mapping[str, object]) -> ForwardPass:
        """Returns a pass of a copy with these attributes and buffers, and notes whether it draws host randomness."""
        model = self._with_values(values)
        draws = HostDraws(model)
        with draws.watch():
            result = self._pass(model, self.batch)
        if draws.source and self._late is None:
            self._late = (self._place_of_draw(values), draws)
        return result

    def _with_values(self, values: Mapping[str, Any]) -> nn.Module:
        """Returns a copy of the network with these attributes and buffers."""
        model = self._fresh()
        modules, buffers = dict(model.named_modules()), dict(model.named_buffers())
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            if name in buffers:
                buffers[name].fill_(value)
            elif path in modules and (attribute in vars(modules[path]) or attribute in vars(self.model)):
                setattr(modules[path], attribute, value)
            elif has_attribute(model, name):
                set_inner_value(model, name, value)
        return model

    def _count_further(self, one: ForwardPass, passes: list[ForwardPass], counted: Sequence[str]) -> None:
        """Adds passes with higher call counters in the buffers, as after more steps."""
        first = dict(self.model.named_buffers())
        numbers = {n: (first[n].item(), one.buffers[n].item()) for n in counted if n in first and first[n].numel() == 1}
        for jump in _JUMPS[:-1] if numbers else ():
            passes.append(self._pass_later({name: a + jump * (b - a) for name, (a, b) in numbers.items()}))

    def _attribute(self, name: str, value: object) -> AttributeFacts:
        if value is None:
            return AttributeFacts(name=name, holds=ITERATOR)
        holds = TENSORS if _has_tensors(value) else NUMBER if isinstance(value, int | float) else GENERATOR
        return AttributeFacts(name=name, holds=holds, line=_line_of_write(self._fresh(), name, self._run_once))

    def _run_once(self, model: nn.Module) -> None:
        self._pass(model, self.batch)

    def _buffers(
        self, one: ForwardPass, others: Sequence[tuple[list[int], ForwardPass]]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the tensors that training moves: by its samples, and in the same way whatever they are."""
        first = self._state(self.model)
        changed = [name for name, value in one.buffers.items() if name in first and not _equal(first[name], value)]
        same = [
            name
            for name in changed
            if others and all(_is_close(one.buffers[name], each.buffers[name]) for _, each in others)
        ]
        return tuple(name for name in changed if name not in same), tuple(same)

    def _draws_by_sample(self, facts: NetworkFacts) -> bool:
        """True if passes over the batch and over its parts draw the same numbers for each sample."""
        rows = [*range(self.rows)]
        passes = []
        for part in (rows, rows[:-1], rows[-1:]):
            model = self._fresh()
            with drawing_by_sample(model, facts, part[0], len(part)):
                passes.append(self._pass(model, self._rows_of(part)))
        one, *parts = passes
        outputs, losses = [each.outputs for each in parts], [torch.tensor(each.loss) for each in passes]
        adds_up = facts.loss_mixes or _is_close(losses[0], losses[1] + losses[2], 1e-3)
        return adds_up and are_parts(one.outputs, outputs, 1e-3)

    # ------------------------------------------------------------------------------------------------ mixing

    def _sample_passes(self, one: ForwardPass, *, training: bool) -> list[tuple[list[int], ForwardPass]]:
        """Returns the passes of each sample repeated, and of a part of the batch unless draws depend on its size."""
        rows = [[row] * self.rows for row in range(self.rows)] + [list(range(self.rows - 1))] * (not one.drew)
        return [(each, self._pass(self._fresh(), self._rows_of(each), training=training)) for each in rows]

    def _mixing(
        self, one: ForwardPass, others: Sequence[tuple[list[int], ForwardPass]], *, training: bool
    ) -> CodePlace | None:
        """Returns the place at which the output of a sample begins to depend on other samples; None if none does."""
        for rows, other in others:
            kept, tolerance = (rows[:1], 1e-5) if len(rows) == self.rows else (rows, 1e-3)
            if self._same_rows(one.outputs, other.outputs, len(rows), kept, tolerance):
                continue
            if not self._repeats(one, training=training, times=_REPEATS):
                self.unsteady = True
                return None
            place = self._locate(rows, kept, tolerance, training=training)
            return place or CodePlace(module="", kind=type(self.model).__name__)
        return None

    def _same_rows(
        self, one: Sequence[Tensor], other: Sequence[Tensor], rows: int, kept: Sequence[int], tolerance: float
    ) -> bool:
        pairs = zip(one, other, strict=False)
        return all(
            _is_close(a[kept], b[kept], tolerance)
            for a, b in pairs
            if a.dim() and a.shape[0] == self.rows and b.dim() and b.shape[0] == rows
        )

    def _locate(
        self, rows: Sequence[int], kept: Sequence[int], tolerance: float, *, training: bool
    ) -> CodePlace | None:
        """Returns the place of the first operation whose numbers for the kept samples differ; None if none do.

        Samples are repeated up to a number that other first dims hardly have, as three joined projections do. A third
        pass, of the same samples in another order, identifies tensors that have something else before the samples.
        """
        one_size, other_size = _ODD_SIZES[0] if len(rows) == self.rows else _ODD_SIZES[1], _ODD_SIZES[0]
        one, other = (
            [*chosen, *chosen[-1:] * (size - len(chosen))]
            for chosen, size in ((list(range(self.rows)), one_size), (list(rows), other_size))
        )
        backward = [one_size - 1 - row for row in kept]
        passes = ((one, kept), (other, kept), (one[::-1], backward))
        results = [self._operations(chosen, places, training=training) for chosen, places in passes]
        doubtful: CodePlace | None = None
        for (place, a), (_, b), (_, c) in zip(results[0], results[1], results[2], strict=False):
            if a.shape != b.shape:
                continue
            if _is_close(a, b, tolerance):
                doubtful = None  # what went before was no difference of samples
            elif a.shape == c.shape and _is_close(a, c, tolerance):
                return place
            else:
                doubtful = doubtful or place
        return doubtful

    def _operations(
        self, rows: Sequence[int], kept: Sequence[int], *, training: bool
    ) -> list[tuple[CodePlace, Tensor]]:
        """Returns the numbers that each operation of a pass has for the kept samples, with its place."""
        model = self._fresh()
        names = names_of(model)
        results: list[tuple[CodePlace, Tensor]] = []

        def run_operation(func: Operator, args: Arguments, kwargs: Options) -> object:
            result = func(*args, **kwargs)
            for tensor in tensors(result):
                if not tensor.is_floating_point() or not tensor.dim() or not tensor.shape[0]:
                    continue
                if tensor.shape[0] % len(rows) == 0:
                    samples = tensor.detach().unflatten(0, (len(rows), -1))
                    results.append((place_of(sys._getframe(1), names, model), samples[list(kept)].clone()))
            return result

        with OperationMode(run_operation):
            self._pass(model, self._rows_of(rows), training=training)
        return results

    def _loss_mixes(self) -> bool:
        """True if the loss is no sum over the samples of a batch."""

        def loss(*rows: int) -> Tensor:
            return torch.tensor(self._pass(self._fresh(), self._rows_of(rows)).loss, dtype=torch.float64)

        first = loss(0, 0)
        for row in range(1, self.rows):
            apart, together = first + loss(row, row), loss(0, row) + loss(row, 0)
            if not torch.allclose(together, apart, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True):
                return True
        return False


def with_fixed_statistics(model: nn.Module) -> nn.Module:
    """Makes torch's batch norms use their running statistics, in place, so that they mix no samples."""
    for module in model.modules():
        if isinstance(module, AnyBatchNorm):
            if type(module).forward is AnyBatchNorm.forward:
                module.training = False
            elif not isinstance(module, _FixedStatistics):
                module.__class__ = derived_norm("Fixed", _FixedStatistics, type(module))
            if module.running_mean is None:
                module.running_mean, module.running_var = (
                    torch.zeros(module.num_features),
                    torch.ones(module.num_features),
                )
    return model


class _FixedStatistics(AnyBatchNorm):
    """A batch norm that a user's class is derived from, and that takes its running statistics in training."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def _count_calls(model: nn.Module) -> Counter[str]:
    """Returns the calls of each batch norm that a training synchronises, counted from now on."""
    model.train()
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, AnyBatchNorm) and module.training and getattr(module, "sync", True):
            calls[name] = 0
            module.register_forward_pre_hook(lambda module, _, name=name: calls.update([name]))
    return calls


def _without_zeros(model: nn.Module) -> nn.Module:
    """Gives parameters that begin at zero small numbers, in place, so that they hide nothing."""
    numbers = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=numbers))
    return model


def _iterators(model: nn.Module) -> list[str]:
    return [name for name, value in held_values(model) if isinstance(value, Iterator) and has_attribute(model, name)]


# ------------------------------------------------------------------------------------------------- comparison


def _attributes(model: nn.Module) -> dict[str, object]:
    """Returns copies of the plain attributes and variables that hold tensors, numbers or random generators."""
    found: dict[str, object] = {}
    for name, value in held_values(model):
        if isinstance(value, bool | int | float | Tensor) or _has_tensors(value):
            found[name] = map_tensors(lambda each: each.detach().clone(), value)
        elif is_generator(value):
            found[name] = _Generator(repr(generator_state(value)))
    return found


@dataclass(frozen=True)
class _Generator:
    state: str


def _copied(value: object) -> object:
    """Returns a copy of an attribute, whose tensors belong to no graph."""
    return map_tensors(lambda each: each.detach().clone(), value) if _has_tensors(value) else copy.deepcopy(value)


def _has_tensors(value: object) -> bool:
    # The values as they are: a table of activations, as that of `transformers`, makes a module at each look.
    parts = list(dict.values(value)) if isinstance(value, dict) else value
    return isinstance(value, Tensor) or (isinstance(parts, list | tuple) and bool(tensors(parts)))


def _equal(one: object, other: object) -> bool:
    a, b = tensors(one), tensors(other)
    if a or b:
        return len(a) == len(b) and all(_is_close(*pair, 0.0) for pair in zip(a, b, strict=True))
    return type(one) is type(other) and bool(one == other)


def _is_close(one: Tensor, other: Tensor, tolerance: float = 1e-5) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    scale = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _passes_agree(one: ForwardPass, other: ForwardPass) -> bool:
    return (
        one.used == other.used
        and len(one.outputs) == len(other.outputs)
        and all(_is_close(*pair) for pair in zip(one.outputs, other.outputs, strict=True))
    )


# ------------------------------------------------------------------------------------------------- attributes


def _line_of_write(model: nn.Module, name: str, run: Callable[[nn.Module], None]) -> str:
    """Returns the line of the network's code that sets an attribute of a module; "" for one that changes in place."""
    path, _, attribute = name.rpartition(".")
    module = dict(model.named_modules()).get(path)
    if module is None or attribute not in vars(module):
        return ""
    with _noting_writes(module, attribute, model) as places:
        run(model)
    return places[0].line if places else ""


@contextmanager
def _noting_writes(module: nn.Module, attribute: str, model: nn.Module) -> Iterator[list[CodePlace]]:
    import sys

    places: list[CodePlace] = []
    kind, names = type(module), names_of(model)

    def setting(self: Any, name: str, value: Any) -> None:
        if name == attribute and self is module:
            places.append(place_of(sys._getframe(1), names, model))
        kind.__setattr__(self, name, value)

    module.__class__ = type(kind.__name__, (kind,), {"__setattr__": setting, "__module__": kind.__module__})
    try:
        yield places
    finally:
        module.__class__ = kind
