"""Matches the tensors of a file of weights with the tensors of a model, for the compiler and the runtime.

Model: a tensor of the file is taken if a pattern of `only` matches its name (all are, without patterns). The first
rename that matches gives it another name. It goes into the tensor of the model of that name, or, for a tied weight, of
any of its names. Patterns follow `fnmatch`: `*` is any text, dots included. In a rename, as `model.* -> encoder.*`,
each `*` on the right repeats the text of the `*` at the same place on the left. That text is as short as possible.

Contract: a tensor of the model is a fault if the file lacks it, or has another shape of it. A pattern of
`allow_missing` that matches one of its names allows it; tensors of the file that the model does not have are faults
unless one of `allow_unused` matches their name in the file. A tensor that `only` leaves out is no fault on either side.

Files of the hub have one matrix for each expert of a mixture, and a model has a stack of them. `stack_experts` gives
the stacks the names of the model, before any pattern applies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from dslc.compiler.ir.parameter_names import matches

Shapes = Mapping[str, tuple[int, ...]]
ARROW = " -> "
_GATE_UP, _DOWN = "experts.gate_up_proj", "experts.down_proj"
_EXPERT = r"(.*?)(mlp|block_sparse_moe)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
_MATRIX = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # of Mixtral


class WeightMatch(NamedTuple):
    """Names of the model are in `taken` and `copies` (with the names in the file), `initial`, `missing` and `unlike`
    (with the names in the file). Names of the file are in `left_out`, `unused` and `twice` (with the name of both).
    """

    taken: tuple[tuple[str, str], ...]
    copies: tuple[tuple[str, str], ...]  # further names of a tied weight, whose numbers have to be the same
    initial: tuple[str, ...]  # keep their initial values, as the job allows
    left_out: tuple[str, ...]  # are not read, as the job says
    missing: tuple[str, ...]
    unlike: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    twice: tuple[tuple[str, str], ...]

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unlike or self.unused or self.twice)


class ExpertStack(NamedTuple):
    """A tensor of a model that a file has in pieces: `matrices` of each expert, one below the other. With two dims it
    is the one matrix under another name.
    """

    shape: tuple[int, ...]
    matrices: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> Iterable[str]:
        return (name for matrices in self.matrices for name in matrices)


def stack_experts(found: Shapes, wanted: Iterable[str]) -> dict[str, ExpertStack]:
    """Returns the stacks of matrices in a file, by their names in the model; none if the model has no stacks.

    A layer whose experts are not numbered from 0 on, or differ in shape, is left as it is in the file.
    """
    if not any(name.endswith((_GATE_UP, _DOWN)) for name in wanted):
        return {}
    layers: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
    for name in found:
        if match := re.fullmatch(_EXPERT, name):
            prefix, block, number, matrix = match.groups()
            layers.setdefault((prefix, block), {}).setdefault(int(number), {})[_MATRIX.get(matrix, matrix)] = name
    stacks = {}
    for (prefix, block), experts in layers.items():
        for stack, parts in ((_GATE_UP, ("gate_proj", "up_proj")), (_DOWN, ("down_proj",))):
            matrices = tuple(
                tuple(experts.get(number, {}).get(part, "") for part in parts) for number in range(len(experts))
            )
            shapes = {found.get(name, ()) for names in matrices for name in names}
            if len(shapes) == 1 and len(shape := shapes.pop()) == 2:
                full = (len(matrices), len(parts) * shape[0], shape[1])
                stacks[f"{prefix}mlp.{stack}"] = ExpertStack(full, matrices)
        gate = f"{prefix}{block}.gate.weight"
        if block != "mlp" and gate in found:
            stacks[f"{prefix}mlp.gate.weight"] = ExpertStack(found[gate], ((gate,),))
    return stacks


def fit(
    found: Shapes,
    wanted: Shapes,
    ties: Mapping[str, str],
    *,
    only: Sequence[str] = (),
    rename: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    allow_unused: Sequence[str] = (),
) -> WeightMatch:
    """Returns the places of the tensors `found` in a file among those `wanted` by a model, both with their shapes.

    `ties` maps each further name of a tied weight to its first, which is in `wanted`.
    """
    renames = [_split(each) for each in rename]
    chosen, may_miss, may_be_over = (partial(matches, patterns) for patterns in (only, allow_missing, allow_unused))
    named: dict[str, str] = {}  # the name in the file, by the name in the model
    hidden: set[str] = set()
    left_out: list[str] = []
    twice: list[tuple[str, str]] = []
    for name in found:
        called = _renamed(name, renames)
        if only and not chosen(name):
            left_out.append(name)
            hidden.add(ties.get(called, called))
        elif called in named:
            twice.append((name, called))
        else:
            named[called] = name
    names: dict[str, list[str]] = {name: [name] for name in wanted}
    for name, whose in ties.items():
        names.get(whose, []).append(name)
    taken: list[tuple[str, str]] = []
    copies: list[tuple[str, str]] = []
    unlike: list[tuple[str, str]] = []
    initial: list[str] = []
    missing: list[str] = []
    for name, shape in wanted.items():
        there = [named[each] for each in names[name] if each in named]
        allowed = any(map(may_miss, names[name]))
        other = next((each for each in there if found[each] != shape), None)
        if not there:
            (initial if allowed or name in hidden else missing).append(name)
        elif other is None:
            taken.append((name, there[0]))
            copies += [(name, each) for each in there[1:]]
        elif allowed:
            initial.append(name)
        else:
            unlike.append((name, other))
    unused = [name for called, name in named.items() if ties.get(called, called) not in wanted]
    left_out += [name for name in unused if may_be_over(name)]
    return WeightMatch(
        taken=tuple(taken),
        copies=tuple(copies),
        initial=tuple(initial),
        left_out=tuple(left_out),
        missing=tuple(missing),
        unlike=tuple(unlike),
        unused=tuple(name for name in unused if not may_be_over(name)),
        twice=tuple(twice),
    )


def faults(fit: WeightMatch, found: Shapes, wanted: Shapes) -> list[tuple[str, list[str]]]:
    """Returns the faults of a fit by kind, in words that follow "the file"."""
    kinds = (
        ("lacks", _quoted(fit.missing)),
        ("has besides", _quoted(fit.unused)),
        (
            "has unlike tensors:",
            [f"`{there}` is {list(found[there])} there and {list(wanted[name])} here" for name, there in fit.unlike],
        ),
        ("has two tensors for one name:", [f"`{there}` would be `{name}` too" for there, name in fit.twice]),
    )
    return [(what, said) for what, said in kinds if said]


def renames_any(rename: str, names: Iterable[str]) -> bool:
    """True if the left side of a rename is a pattern of one of the names."""
    left, _ = _split(rename)
    return any(_captured(left, name) is not None for name in names)


def stars(rename: str) -> tuple[int, int]:
    """Returns the numbers of `*` on the left and on the right of a rename."""
    left, right = _split(rename)
    return left.count("*"), right.count("*")


def _split(rename: str) -> tuple[str, str]:
    left, _, right = rename.partition(ARROW)
    return left.strip(), right.strip()


def _renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    for left, right in renames:
        texts = _captured(left, name)
        if texts is not None:
            first, *others = right.split("*")
            return first + "".join(text + other for text, other in zip(texts, others, strict=False))
    return name


def _captured(pattern: str, name: str) -> list[str] | None:
    """Returns the texts that each `*` of a pattern stands for in a name; None if it is not one of the pattern."""
    first, *others = pattern.split("*")
    if not others:
        return [] if name == pattern else None
    if not name.startswith(first):
        return None
    at, texts = len(first), []
    for part in others[:-1]:
        end = name.find(part, at)
        if end < 0:
            return None
        texts.append(name[at:end])
        at = end + len(part)
    last = len(name) - len(others[-1])
    if last < at or not name.endswith(others[-1]):
        return None
    return [*texts, name[at:last]]


def _quoted(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]
