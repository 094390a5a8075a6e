"""The tensor axis of a network that a function makes: the modules to cut, and their styles.

Model: `parallelism.tensor_plan` names modules by pattern (`fnmatch`, over the names of torch's `named_modules`; `*` is
any text, dots included), each with a style of `STYLES`. A model of `transformers` brings a plan of its own, whose
styles are translated (`PUBLISHED`); the job's replaces it. A module that no entry names is whole on every rank.

A dense layer whose features are several things side by side, as queries, keys and values are, is a `column in 3 parts`.
It is a `column in parts [4, 1, 1]` if the parts are of unequal sizes, given by their ratio: each rank has a share of
every part.

Contract: plain Python over the traced facts of the modules. `chosen` returns one style for each module that is cut, in
the order of the modules, or the reason why an entry cannot be used. compiler/trace/sharding/tensor_parallel_check.py
proves that the cut network computes the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from dslc.compiler.ir.parameter_names import BASE, FIRST, SECOND
from dslc.compiler.ir.tensor_styles import TensorStyle
from dslc.dsl.record import Record, record
from dslc.dsl.words import article, plural

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts, ModuleFacts

# The styles that a job may give a module; `runtime/parallel/tensor_parallel.py` applies them.
STYLES: Mapping[TensorStyle, str] = {
    TensorStyle.COLUMN: "a `Linear` that gives each rank a share of its features",
    TensorStyle.ROW: "a `Linear` that is given such shares, and whose sums are whole",
    TensorStyle.GATHERED: "a column whose shares are put together at once",
    TensorStyle.ROW_OF_WHOLE: "a row that is given the whole, of which each rank takes its share",
    TensorStyle.VOCABULARY: "an `Embedding`, whose rows are shared out",
    TensorStyle.SUMMED: "a module that works on shares with parameters that every rank has whole, as a norm of each "
    "head does",
}

_IN_PARTS = r"column +in +(?:(\d{1,4}) +parts|parts *\[([\d, ]{1,400})\])"

# The styles of the library's plans, in ours; None: the module stays as it is.
PUBLISHED: Mapping[str, TensorStyle | None] = {
    "colwise": TensorStyle.COLUMN,
    "rowwise": TensorStyle.ROW,
    "colwise_rep": TensorStyle.GATHERED,
    "colwise_gather_output": TensorStyle.GATHERED,
    "rowwise_rep": TensorStyle.ROW_OF_WHOLE,
    "rowwise_split_input": TensorStyle.ROW_OF_WHOLE,
    "embedding_rowwise": TensorStyle.VOCABULARY,
    "replicated_with_grad_allreduce": TensorStyle.SUMMED,
    "replicate": None,
}


@record
class TensorPlanFault(Record):
    """Why the plan cannot be used. `entry` is the entry at fault; "" in the library's own plan. `unknown` is its
    pattern if that names no module.
    """

    code: str
    entry: str
    message: str
    help: str = ""
    unknown: str = ""


@dataclass(kw_only=True)
class TensorPlanStyles:
    """`uneven` are counts that the ranks cannot share: the module, the kind of count, the number. `ignored` are entries
    that name no module, beside entries that do: warnings. `parts` are the rows of each part of a column, by module.
    """

    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    styles: list[tuple[str, TensorStyle]] = field(default_factory=list)
    faults: list[TensorPlanFault] = field(default_factory=list)
    ignored: list[TensorPlanFault] = field(default_factory=list)
    uneven: list[tuple[str, str, int]] = field(default_factory=list)


class PlanEntry(NamedTuple):
    """An entry of a plan: a pattern, its style, and the sizes of the parts of a column, in any unit."""

    pattern: str
    style: TensorStyle
    parts: tuple[int, ...] = ()


def parse_entry(entry: str) -> PlanEntry | TensorPlanFault:
    pattern, colon, style = (part.strip() for part in entry.rpartition(":"))
    if not colon or not pattern or not style:
        return TensorPlanFault(
            code="E0426",
            entry=entry,
            message=f"`{entry}` is not a pattern with a style",
            help='`"blocks.*.up: column"`',
        )
    style_found = next((known_style for known_style in STYLES if known_style == style), None)
    if style_found is not None:
        return PlanEntry(pattern, style_found)
    in_parts = re.fullmatch(_IN_PARTS, style)
    if in_parts is None:
        words = ", ".join(f"`{word}`" for word in STYLES)
        return TensorPlanFault(
            code="E0426",
            entry=entry,
            message=f"`{style}` is not a style of the tensor axis",
            help=f"one of {words}; or `column in 3 parts`, `column in parts [4, 1, 1]`",
        )
    count, sizes = in_parts.groups()
    parts = (1,) * int(count) if count else tuple(int(size) for size in sizes.replace(",", " ").split())
    if len(parts) < 2 or 0 in parts:
        return TensorPlanFault(
            code="E0426",
            entry=entry,
            message=f"`{style}` has {plural(len(parts), 'part')}" + (", one of size 0" if 0 in parts else ""),
            help="two parts or more, or `column`",
        )
    return PlanEntry(pattern, TensorStyle.COLUMN, parts)


def resolve_styles(plan: Sequence[str] | None, facts: ModelFacts, ranks: int) -> TensorPlanStyles:
    """Returns the styles that `plan`, or by default the library's own, gives the modules on `ranks` ranks."""
    resolved = TensorPlanStyles()
    modules = {module.name: module for module in facts.modules}
    named = _published(facts, modules, resolved) if plan is None else _styles_of_plan(plan, modules, resolved)
    _beside_adapters(named, modules, resolved.parts)
    for name, module in modules.items():
        if name not in named:
            continue
        style, entry = named[name]
        parts = resolved.parts.pop(name, ())
        wrong = _misfit(module, style) or _misfit_of_parts(module, parts)
        if wrong:
            code = "E0427" if plan is None else "E0426"
            resolved.faults.append(
                TensorPlanFault(code=code, entry=entry, message=wrong, help=_instead(module, style, modules))
            )
            continue
        resolved.styles.append((name, style))
        if parts:
            resolved.parts[name] = tuple(module.weight[0] * size // sum(parts) for size in parts)
            resolved.uneven += [(name, "features", size) for size in sorted({*resolved.parts[name]}) if size % ranks][
                :1
            ]
            continue
        what, count = _divided_count(module, style)
        if count % ranks:
            resolved.uneven.append((name, what, count))
    _ties(facts, dict(resolved.styles), named, resolved)
    return resolved


def _styles_of_plan(
    plan: Sequence[str], modules: Mapping[str, ModuleFacts], resolved: TensorPlanStyles
) -> dict[str, tuple[TensorStyle, str]]:
    """Returns by module the style, and the entry that gives it."""
    named: dict[str, tuple[TensorStyle, str]] = {}
    unknown: list[tuple[str, str]] = []
    for entry in plan:
        parts = parse_entry(entry)
        if isinstance(parts, TensorPlanFault):
            resolved.faults.append(parts)
            continue
        pattern, style, sizes = parts
        matched = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matched:
            unknown.append((entry, pattern))
        for name in matched:
            previous_style, previous_entry = named.setdefault(name, (style, entry))
            if previous_entry == entry and sizes:
                resolved.parts[name] = sizes
            if previous_style != style or resolved.parts.get(name, ()) != sizes:
                message = f"`{name}` is a `{previous_style}` by `{previous_entry}`, and a `{style}` by `{entry}`"
                resolved.faults.append(
                    TensorPlanFault(code="E0426", entry=entry, message=message, help="one style for each module")
                )
                break
    for entry, pattern in unknown:
        message, code = f"no module is called `{pattern}`", "W0426" if named else "E0426"
        (resolved.ignored if named else resolved.faults).append(
            TensorPlanFault(code=code, entry=entry, message=message, unknown=pattern)
        )
    return named


def _published(
    facts: ModelFacts, modules: Mapping[str, ModuleFacts], resolved: TensorPlanStyles
) -> dict[str, tuple[TensorStyle, str]]:
    named: dict[str, tuple[TensorStyle, str]] = {}
    for name, style in facts.published:
        ours = PUBLISHED.get(style)
        if style not in PUBLISHED or (ours and name not in modules):
            resolved.faults.append(
                TensorPlanFault(
                    code="E0427",
                    entry="",
                    message=f"the model's own plan has `{name}` as `{style}`, which dslc cannot carry out",
                )
            )
            return {}
        if ours is not None:
            named[name] = (ours, "")
    return named


def _beside_adapters(
    named: dict[str, tuple[TensorStyle, str]], modules: Mapping[str, ModuleFacts], parts_of: dict[str, tuple[int, ...]]
) -> None:
    """Cuts, in place of a layer with an adapter, what is in it. Of a column the second matrix is one too, and the first
    is whole; of a row the first is one, and the second is whole. Both sums are whole then, and so are their gradients.
    """
    for name in [module_name for module_name in named if f"{module_name}.{FIRST}" in modules]:
        style, entry = named.pop(name)
        parts = parts_of.pop(name, ())
        matrix = FIRST if style in (TensorStyle.ROW, TensorStyle.ROW_OF_WHOLE) else SECOND
        for part in (BASE, matrix):
            named.setdefault(f"{name}.{part}", (style, entry))
            if parts:
                parts_of.setdefault(f"{name}.{part}", parts)


def _misfit(module: ModuleFacts, style: TensorStyle) -> str:
    """Returns the reason why a module cannot have this style; "" if it can."""
    if style is TensorStyle.SUMMED:
        return "" if module.parameters else f"`{module.name}` ({module.kind}) has no parameters of its own"
    expected = "Embedding" if style is TensorStyle.VOCABULARY else "Linear"
    if module.plain == expected:
        return ""
    kind = article(f"`{module.kind}`")
    return f"`{module.name}` is {kind}, and `{style}` is of {article(f'`{expected}`')} or a class derived from it"


def _misfit_of_parts(module: ModuleFacts, parts: tuple[int, ...]) -> str:
    """Returns the reason why the features of a dense layer are not these parts; "" if they are."""
    if not parts or module.weight[0] % sum(parts) == 0:
        return ""
    count = f"{len(parts)} parts" if len(set(parts)) == 1 else f"parts of {list(parts)}, {sum(parts)} together"
    return f"`{module.name}` has {plural(module.weight[0], 'feature')}, which are not {count}"


def _instead(module: ModuleFacts, style: TensorStyle, modules: Mapping[str, ModuleFacts]) -> str:
    """Suggests a module inside a module that cannot have this style."""
    candidates = (
        name
        for name, submodule in modules.items()
        if name.startswith(f"{module.name}.") and not _misfit(submodule, style)
    )
    inside = next(candidates, None)
    return (
        f"name what is in it: `{inside}`"
        if inside
        else "leave it out: a module that no entry names is whole on every rank"
    )


def _divided_count(module: ModuleFacts, style: TensorStyle) -> tuple[str, int]:
    if style is TensorStyle.SUMMED:
        return "", 0
    if style is TensorStyle.VOCABULARY:
        return "vocab", module.weight[0]
    return "features", module.weight[0 if style.cut == 0 else 1]


def _ties(
    facts: ModelFacts,
    styles: Mapping[str, TensorStyle],
    named: Mapping[str, tuple[TensorStyle, str]],
    resolved: TensorPlanStyles,
) -> None:
    for one, other_name in facts.ties:
        first_style, second = (styles.get(name.rpartition(".")[0]) for name in (one, other_name))
        owners = [name.rpartition(".")[0] for name in (one, other_name)]
        if _cut(first_style) == _cut(second) and len({resolved.parts.get(name, ()) for name in owners}) == 1:
            continue
        owner = one.rpartition(".")[0] if first_style else other_name.rpartition(".")[0]
        resolved.faults.append(
            TensorPlanFault(
                code="E0429",
                entry=named[owner][1],
                message=f"`{one}` and `{other_name}` are one weight, and the one is {_worded(first_style)}, the other "
                f"{_worded(second)}",
                help="an `Embedding` as `vocabulary` and the `Linear` with its weight as `gathered` go together",
            )
        )


def _cut(style: TensorStyle | None) -> int | None:
    """Returns the dim along which a weight is cut."""
    return style.cut if style else None


def _worded(style: TensorStyle | None) -> str:
    return f"cut as `{style}`" if style else "whole"
