"""Proves, without numbers, that a module cut over the tensor axis computes the same as the whole module.

Model: between a column and a row a rank has a *share* of a tensor: one of `ranks` equal pieces along one dim. The
module is run twice without memory (run.py). In the first run all is whole, and each share is followed through the
operations from the columns on. The result of an operation is a share if the operation works on each piece for itself
(propagation.py); if not, the plan is refused. In the second run the cut modules have the parameters of one rank. It
must run the same operations in the same order, with the same numbers, on tensors of the same shapes. Only shares are
smaller, in that dim and by that factor. So its results are the pieces of the results in one process.

Backward, a column sums the gradients of its input, and `summed` modules sum the gradients of their parameters. The
gradients of anything else that every rank has whole would differ by rank: if such a tensor meets shares and trains, the
plan is refused.

Contract: a plan without a fault gives the outputs and the gradients of one process. A fault names the module.

Limits: as in all tracing, one path. Unknown operations are refused. A tensor made under `torch.no_grad` counts as one
without a gradient.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from dslc.compiler.ir.module_facts import CutCall, ModelFacts, ModuleFacts, ShareFacts
from dslc.compiler.ir.steps import CutDraw
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.compiler.ir.tensors import TensorFact
from dslc.compiler.placement.tensor_patterns import resolve_styles
from dslc.compiler.trace.batch import SMALL
from dslc.compiler.trace.flops import flops_of
from dslc.compiler.trace.private_torch import ATTENTION, Arguments, Operator, Options, own_parameters
from dslc.compiler.trace.reuse.block_reuse import BlockReuse
from dslc.compiler.trace.run import TensorMap, TracedModule, storage, tensors_of
from dslc.compiler.trace.sharding.cut_draws import cut_draws
from dslc.compiler.trace.sharding.propagation import (
    CUTS,
    ShareError,
    TensorOperation,
    TensorShare,
    follow,
    share_of_parts,
    start_of,
)
from dslc.compiler.trace.sharding.share_run import (
    OperationRecord,
    ShareRun,
    numbers_of,
    operation_name,
    share_shape,
)

_COUNTED = ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size", "hidden_size")
_FREE = "sizes that follow from the tensor's, as in `view(batch, length, -1, head_size)`"


def with_shares(
    facts: ModelFacts, traced: TracedModule, ranks: int, plan: Sequence[str] | None, skipped: BlockReuse
) -> ModelFacts:
    """Returns the facts of a module without memory on a tensor axis of `ranks` ranks; `plan` is the job's.
    `skipped` blocks are cut like their representatives; raises BlocksDifferError if they are not.
    """
    model = traced.model
    facts = replace(facts, modules=_modules(model), published=_published(model), counts=_counts(model))
    found = resolve_styles(plan, facts, ranks)
    if found.faults or found.uneven or not found.styles:
        return facts
    skipped.check_all({name: f"{style} {found.parts.get(name, ())}" for name, style in found.styles})
    whole = _UnshardedRun(traced, dict(found.styles), found.parts)
    shares = ShareFacts(ranks=ranks, styles=tuple(found.styles), parts=tuple(found.parts.items()))
    try:
        whole.forward()
        part = _ShardedRun(traced, dict(found.styles), ranks)
        failed = part.forward()
        _compare(whole, part, ranks, ended=failed is None)
        if failed is not None:
            raise ShareError(f"{_named(part.module)} fails on a rank's share: {failed}", part.module, _FREE)
    except ShareError as refused:
        skipped.forbid(refused.text)
        fault = replace(shares, fault=refused.text, module=refused.module, help=refused.help)
        return replace(facts, shares=fault)
    skipped.check(part.flops)
    counts = skipped.inserted(list(part.flops.items()), lambda each: each[0], lambda each, path: (path, each[1]))
    calls = skipped.inserted(whole.calls, lambda call: call.module, lambda call, path: replace(call, module=path))
    shares = replace(
        shares,
        calls=tuple(calls),
        summed=tuple(skipped.named(whole.summed)),
        head=whole.head,
        work=tuple((path, count // SMALL) for path, count in counts),
        attended=tuple(part.attended),
        draws=None if whole.draws_inside else _named_draws(cut_draws(whole.records, facts.network), skipped),
    )
    return replace(facts, shares=shares)


def _named_draws(draws: tuple[CutDraw, ...] | None, skipped: BlockReuse) -> tuple[CutDraw, ...] | None:
    """Returns the draws, with the draws of skipped blocks."""
    if draws is None:
        return None
    return tuple(skipped.inserted([*draws], lambda draw: draw.module, lambda draw, path: replace(draw, module=path)))


def _modules(model: nn.Module) -> tuple[ModuleFacts, ...]:
    """Returns all modules, and whether torch can cut each."""

    found = []
    for name, module in model.named_modules():
        own, weight = own_parameters(module).keys(), own_parameters(module).get("weight")
        kinds = (torch.nn.Linear, torch.nn.Embedding) if "weight" in own and own <= {"weight", "bias"} else ()
        plain = next((kind for kind in kinds if isinstance(module, kind)), None)
        found.append(
            ModuleFacts(
                name=name,
                kind=type(module).__name__,
                plain=plain.__name__ if plain else "",
                weight=tuple(weight.shape) if plain and weight is not None else (),
                parameters=any(parameter is not None for parameter in own_parameters(module).values()),
            )
        )
    return tuple(found)


def _published(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns the plan for the tensor axis that a `transformers` model publishes, name by name. Its `*` is a number."""
    plan = getattr(model, "_tp_plan", None)  # `tp_plan` is newer
    if not isinstance(plan, dict):
        return ()
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    patterns = {each: re.compile(re.escape(each).replace(r"\*", r"\d+")) for each in plan}
    return tuple((name, plan[each]) for each, wanted in patterns.items() for name in names if wanted.fullmatch(name))


def _counts(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Returns the head counts and sizes in a `transformers` configuration."""
    text = getattr(getattr(model, "config", None), "get_text_config", None)
    found = {name: getattr(text(), name, None) for name in _COUNTED} if text else {}
    return tuple((name, count) for name, count in found.items() if isinstance(count, int))


class _StyledRun(ShareRun):
    """A run that records each operation outside of cut modules, `styles` by their paths."""

    def __init__(self, traced: TracedModule, styles: Mapping[str, TensorStyle]) -> None:
        super().__init__(traced)
        self.styles = styles
        self.summed: list[str] = []  # modules of that style, as they are called
        self.cutting = ""  # the running cut module, whose operations are left to torch

    @contextmanager
    def hooked(self) -> Iterator[None]:
        with ExitStack() as around, super().hooked():
            for path, style in self.styles.items():
                module = self.model.get_submodule(path)
                if style is TensorStyle.SUMMED:
                    before = module.register_forward_pre_hook(lambda *_, path=path: self.summed.append(path))
                else:
                    before = module.register_forward_pre_hook(self._input_hook(path, style), with_kwargs=True)
                    around.callback(module.register_forward_hook(self._output_hook(path, style)).remove)
                around.callback(before.remove)
            yield

    def _input_hook(self, path: str, style: TensorStyle) -> Callable[..., tuple[Arguments, Options]]:
        def hook(module: nn.Module, args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
            self.cutting = path
            if kwargs or len(args) != 1 or len(tensors_of(args)) != 1:
                raise ShareError(f"{_named(path)} is cut, and is called with more than one tensor", path)
            return (self.module_input(path, style, args[0]),), kwargs

        return hook

    def _output_hook(self, path: str, style: TensorStyle) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: Arguments, output: torch.Tensor) -> torch.Tensor:
            if self.cutting != path:
                return output
            output = self.module_output(path, style, args[0], output)
            self.cutting = ""
            return output

        return hook

    def module_input(self, path: str, style: TensorStyle, x: torch.Tensor) -> torch.Tensor:
        """Called with the input of a cut module."""
        return x

    def module_output(self, path: str, style: TensorStyle, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Called with the output of a cut module."""
        return output

    def note(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        name, given, made = operation_name(func), tensors_of((args, kwargs)), tensors_of(result)
        cut = name in CUTS
        starts = _starts(name, args, kwargs, given[0], made) if cut else ()
        self.record(name, given, made, () if cut else numbers_of(args, kwargs), starts=starts)


class _UnshardedRun(_StyledRun):
    """The first run: follows the shares from operation to operation."""

    def __init__(
        self, traced: TracedModule, styles: Mapping[str, TensorStyle], parts: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(traced, styles)
        self.calls: list[CutCall] = []
        self.parts = parts  # rows of each part of a column
        self.head = ""
        self.draws_inside = False  # a cut module draws, or a hook on it
        self._last: tuple[str, object] = ("", None)  # the cut module that was called last, and its output
        self._names = {storage(p): name for name, p in self.model.named_parameters()}
        self._summed = {  # parameters whose gradients their module sums, by their memory
            storage(parameter): path
            for path, style in self.styles.items()
            if style is TensorStyle.SUMMED
            for parameter in self.model.get_submodule(path).parameters(recurse=False)
        }
        self._of_summed = TensorMap[None]()  # tensors that are made of these alone
        self._own: set[int] = set()  # the parameters of the cut module that runs, by their memory
        self._distributed = TensorMap[None]()  # in the cut module that runs, tensors made of its input and weight
        self._taken = {  # parameters that are cut, by their memory
            storage(parameter): path
            for path, style in self.styles.items()
            if style is not TensorStyle.SUMMED
            for parameter in self.model.get_submodule(path).parameters()
        }

    def forward(self) -> None:
        with self.hooked():
            output = self.called()
        path, made = self._last
        self.head = path if made is output and path not in self.parts else ""
        if any(tensor in self.shares for tensor in tensors_of(output)) and not self.head:
            raise ShareError("the network's output is a share of the features on each rank", self._last[0], _WHOLE)

    def module_input(self, path: str, style: TensorStyle, x: torch.Tensor) -> torch.Tensor:
        share = self.shares.get(x)
        if style is not TensorStyle.ROW and share is not None:
            raise ShareError(f"{_named(path)} is a `{style}`, which takes the whole, and is given a share", path)
        if style is TensorStyle.ROW and share is None:
            raise ShareError(f"{_named(path)} is a `row`, and is given the whole", path, "`row_of_whole`")
        if share is not None and (share.dim != x.dim() - 1 or share.outer != 1 or share.parts):
            raise ShareError(f"{_named(path)} is a `row`, and its share is not one of the features", path)
        self._distributed = TensorMap()
        self._distributed.fill([x], None)
        self._own = {storage(parameter) for parameter in self.model.get_submodule(path).parameters()}
        return x

    def module_output(self, path: str, style: TensorStyle, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        if style is TensorStyle.COLUMN:
            sizes = self.parts.get(path, (output.shape[-1],))
            self._share(output, share_of_parts(output.dim() - 1, sizes))
        self.calls.append(CutCall(module=path, input=_fact(x), output=_fact(output)))
        self._last = (path, output)
        return output

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        given = tensors_of((args, kwargs))
        if self.cutting:
            self.draws_inside |= torch.Tag.nondeterministic_seeded in func.tags
            self._check_inside(given, tensors_of(result))
            return
        for tensor in given:
            if tensor is self._last[1]:
                self._last = ("", None)  # it is used further, so it is not the output
            owner = self._taken.get(storage(tensor))
            if owner is not None:
                raise ShareError(
                    f"{_named(self.module)} uses a parameter of {_named(owner)}, which is cut", self.module
                )
        if not any(tensor in self.shares for tensor in given):
            self._add_up(given, tensors_of(result))
        else:
            self._train_alike(given)
            operation = TensorOperation(func, args, kwargs, self.shares)
            try:
                for tensor in tensors_of(result):
                    self._share(tensor, follow(operation, tensor))
            except ShareError as refused:
                raise ShareError(f"{_named(self.module)}: {refused.text}", self.module, refused.help) from None
        self.note(func, args, kwargs, result)

    def _check_inside(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Checks that a cut module computes with its input, its weight and numbers alone: torch computes the same with
        these where they are divided among ranks, whatever its `forward` does.
        """
        own = [t.dim() == 0 or t in self._distributed or storage(t) in self._own for t in given]
        if not all(own) and any(own):
            other = given[own.index(False)]
            what = next((n for n, buffer in self.model.named_buffers() if storage(buffer) == storage(other)), "")
            what = f"`{what}`" if what else f"a tensor of shape {tuple(other.shape)}"
            text = f"{_named(self.cutting)} is cut, and works on what is divided with {what}, which is not"
            raise ShareError(text, self.cutting, "leave it out: a module that no entry names is whole on every rank")
        if all(own):
            self._distributed.fill(made, None)

    def _share(self, tensor: torch.Tensor, share: TensorShare | None) -> None:
        if share is not None:
            self.shares[tensor] = share

    def _is_summed(self, tensor: torch.Tensor) -> bool:
        return self._summed.get(storage(tensor)) in self.path or tensor in self._of_summed

    def _add_up(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Checks that `summed` tensors meet shares: of a whole tensor each rank has all of the gradient already."""
        if not any(self._is_summed(tensor) for tensor in given):
            return
        if not all(self._is_summed(tensor) for tensor in given):
            raise ShareError(f"{_named(self.module)} is `summed`, and works on what every rank has whole", self.module)
        self._of_summed.fill(made, None)

    def _train_alike(self, given: list[torch.Tensor]) -> None:
        """Checks that only shares and summed tensors have a gradient here."""
        for tensor in given:
            if tensor in self.shares or not tensor.requires_grad or self._is_summed(tensor):
                continue
            name = self._names.get(storage(tensor))
            owner = name.rpartition(".")[0] if name else ""
            what = f"the parameter `{name}`" if name else "a tensor that every rank has whole and that has a gradient"
            advice = f'`"{owner}: summed"`' if owner else "make it a share too"
            advice = (
                "use it in the `forward` of its own module" if self.styles.get(owner) is TensorStyle.SUMMED else advice
            )
            raise ShareError(
                f"{_named(self.module)} works on shares with {what}, whose gradient would be of a rank's share alone",
                self.module,
                advice,
            )


class _ShardedRun(_StyledRun):
    """The second run, with the parameters of one rank."""

    def __init__(self, traced: TracedModule, styles: Mapping[str, TensorStyle], ranks: int) -> None:
        super().__init__(traced, styles)
        self.ranks = ranks
        self.flops: dict[str, int] = defaultdict(int)  # by layer
        self.attended: list[int] = []  # numbers of keys and values, by call

    def forward(self) -> str | None:
        """Runs the module; returns the reason if it failed."""
        with self._parameters():
            try:
                with self.hooked():
                    self.called()
            except ShareError:
                raise
            except Exception as error:  # any kind: it comes out of the user's own code
                lines = str(error).strip().split("\n")
                return f"{type(error).__name__}: {lines[0]}"
        return None

    def module_input(self, path: str, style: TensorStyle, x: torch.Tensor) -> torch.Tensor:
        return x.narrow(-1, 0, x.shape[-1] // self.ranks) if style is TensorStyle.ROW_OF_WHOLE else x

    def module_output(self, path: str, style: TensorStyle, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output] * self.ranks, -1) if style is TensorStyle.GATHERED else output

    def operation(self, func: Operator, args: Arguments, kwargs: Options, result: object) -> None:
        if (flops := flops_of(func, args, kwargs, result)) is not None:
            self.flops[self.now] += flops
        if func.overloadpacket.__name__ in ATTENTION:
            self.attended.append(sum(tensor.numel() for tensor in tensors_of(args[1:3])) // SMALL)
        if not self.cutting:
            self.note(func, args, kwargs, result)

    @contextmanager
    def _parameters(self) -> Iterator[None]:
        with ExitStack() as around:
            for path, style in self.styles.items():
                dim = None if style is TensorStyle.VOCABULARY else style.cut
                module = self.model.get_submodule(path)
                around.callback(own_parameters(module).update, dict(own_parameters(module)))
                for name, old in own_parameters(module).items():
                    if dim is None or old is None or (dim == 1 and name == "bias"):
                        continue
                    shape = list(old.shape)
                    shape[dim] //= self.ranks
                    with self.fake:
                        own = torch.empty(shape, dtype=old.dtype)
                    own_parameters(module)[name] = torch.nn.Parameter(own, old.requires_grad)
            yield


_WHOLE = "`gathered` in the place of the last `column`"


def _compare(whole: _UnshardedRun, part: _ShardedRun, ranks: int, *, ended: bool) -> None:
    """Checks that `part` ran the operations of `whole`, on its shares; unless it `ended`, up to where it failed."""
    for one, other in zip(whole.records, part.records, strict=False):
        where = _named(one.module)
        if one.name != other.name or len(one.shapes) != len(other.shapes):
            raise ShareError(f"{where} behaves differently where its modules are cut", one.module, _FREE)
        for (shape, share), (own, _) in zip(one.shapes, other.shapes, strict=True):
            if own == share_shape(shape, share, ranks):
                continue
            if share is None:
                text = f"{where} makes a tensor of shape {own} of the size of a share, where one process has {shape}"
            else:
                text = f"{where} turns its share into a tensor of shape {own}, which is not a share of {shape}"
            raise ShareError(text, one.module, _FREE)
        if one.numbers != other.numbers or _starts_of_part(one, ranks) != other.starts:
            text = f"{where} computes with a number that depends on the size of a share (`{one.name}`)"
            raise ShareError(text, one.module, "the size that one process has")
    more = len(part.records) - len(whole.records)
    if more > 0 or (ended and more < 0):
        module = (part if more > 0 else whole).records[-1].module
        raise ShareError(f"{_named(module)} does more or fewer operations where its modules are cut", module, _FREE)


def _starts(
    name: str, args: Arguments, kwargs: Options, tensor: torch.Tensor, views: Sequence[torch.Tensor]
) -> tuple[int, ...]:
    """Returns the dim of slices, their step, and where each begins."""
    dim = args[1 if name == "slice" else 2] if len(args) > (1 if name == "slice" else 2) else kwargs.get("dim", 0)
    step = args[4] if name == "slice" and len(args) > 4 else 1
    dim %= tensor.dim()
    return (dim, step, *(start_of(tensor, view, dim) for view in views))


def _starts_of_part(record: OperationRecord, ranks: int) -> tuple[int, ...]:
    """Returns where the slices begin on a rank."""
    share = record.shapes[0][1] if record.starts else None
    if share is None or share.dim != record.starts[0]:
        return record.starts
    return (*record.starts[:2], *(start // ranks for start in record.starts[2:]))


def _fact(tensor: torch.Tensor) -> TensorFact:
    return TensorFact(shape=tuple(tensor.shape[1:]), dtype="float32" if tensor.dtype.is_floating_point else "int64")


def _named(path: str) -> str:
    return f"`{path}`" if path else "the network"
