"""Random jobs and networks, drawn from the registry: they use everything that a block, field or call is declared to
take.

    job_texts()    the text of a job file that loads without a mistake
    job_specs()    the `JobSpec` that it is
    networks()     the text of a network of the library, or a list of layers

Each part is valid by itself and independent of the others: a batch need not divide evenly, layers need not fit.
Networks are small (at most four layers, nested at most twice), numbers too.
"""

from __future__ import annotations

import math
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from dslc.dsl.language import blocks, units  # noqa: F401  (`blocks` fills the registry)
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import (
    BLOCKS,
    CALLS,
    AnyValue,
    Bool,
    Call,
    CallOf,
    Dimension,
    Either,
    Field,
    Float,
    Int,
    IntRange,
    Kind,
    ListOf,
    Measure,
    Name,
    Node,
    Path,
    Str,
    Word,
    fields,
)
from dslc.dsl.meaning.load import load_text
from dslc.dsl.meaning.resolve import PROMISES
from dslc.dsl.words import quoted

DEPTH = 2
# One example for each pattern that texts must match.
MATCHING = {
    r"[a-z0-9.-]+:/.*": "runs:/data",
    r"jobset|[A-Za-z][\w.]*=.*": "spec.suspend=true",
    r"(.*/)?(?![^/]*\.py:)[\w.]+:[\w.]+": "../nets/pkg.module:make",
    r"\s*-?\d+\s*(,\s*\d+\s*)*": "0, 2",
    r"[\w.-]+": "own.f-1",
    r"\S+ -> \S+": "model.* -> *",
}

_plain = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs"), exclude_characters="\xa0"), max_size=8)
_texts = st.one_of(_plain, st.sampled_from(['say "no"', "back\\slash", "two\nlines", "a\ttab", "blocks.*.bias", "é"]))
_words = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True).filter(
    lambda word: word not in ("true", "false", "none", "param", "import", "function", "name", "path", "image")
)


def values(kind: Kind, depth: int = 0) -> st.SearchStrategy[str]:  # noqa: C901 - one case for each kind
    """Draws texts that a field of this kind takes."""
    match kind:
        case Int():
            if kind.choices:
                return st.sampled_from(kind.choices).map(str)
            low = int(kind.min) if kind.min is not None else -50
            high = int(kind.max) if kind.max is not None else low + 99
            return st.integers(low, high).map(units.number)
        case Float():
            return _numbers(kind).map(units.number)
        case Bool():
            return st.sampled_from(["true", "false"])
        case Path():
            return st.sampled_from(["/data/x", "/data/*.bin", "here.npz", "../up", "~/home", "with space"]).map(quoted)
        case Str():
            return st.just(quoted(MATCHING[kind.pattern])) if kind.pattern else _texts.map(quoted)
        case Word():
            return st.sampled_from(kind.choices)
        case Name():
            return st.one_of(st.sampled_from(["h100", "cpu"]), _texts.filter(bool).map(quoted))
        case Measure():
            return st.sampled_from(kind.dimensions).flatmap(lambda dimension: _quantity(kind, dimension))
        case IntRange():
            return st.tuples(st.integers(kind.min, 5), st.integers(0, 5)).map(lambda p: f"{p[0]}..{p[0] + p[1]}")
        case ListOf():
            size = kind.length
            items = st.lists(
                values(kind.item, depth), min_size=kind.min_length if size is None else size, max_size=size or 4
            )
            return items.map(lambda found: f"[{', '.join(found)}]")
        case CallOf():
            options = [call for category in kind.categories for call in CALLS[category].values()]
            if depth >= DEPTH:
                options = [call for call in options if not any(_holds_layers(f.kind) for f in fields(call))]
            return st.sampled_from(options).flatmap(lambda call: calls(call, depth + 1))
        case Either():
            return st.one_of([values(inner, depth) for inner in kind.kinds])
        case AnyValue():
            leaf = st.one_of(
                _texts.map(quoted), st.sampled_from(["true", "false", "none"]), st.integers(-9, 99).map(units.number),
                st.floats(allow_nan=False, allow_infinity=False).map(units.number),
            )  # fmt: skip
            return st.one_of(leaf, st.lists(leaf, max_size=3).map(lambda items: f"[{', '.join(items)}]"))
    raise AssertionError(kind)


def _holds_layers(kind: Kind) -> bool:
    return isinstance(kind, ListOf) and isinstance(kind.item, CallOf)


def _numbers(kind: Float | Measure) -> st.SearchStrategy[float]:
    low = kind.min if kind.min is not None else kind.above if kind.above is not None else -5.0
    high = kind.max if kind.max is not None else kind.below if kind.below is not None else low + 10.0
    return st.floats(low, high, exclude_min=kind.above is not None, exclude_max=kind.below is not None)


@st.composite
def _quantity(draw: st.DrawFn, kind: Measure, dimension: Dimension) -> str:
    if dimension in ("ratio",):
        return units.write(draw(_numbers(kind)), dimension)
    low = 1 if kind.min is None else math.ceil(kind.min)
    unit = draw(st.sampled_from([unit for unit, (of, _, _) in units.UNITS.items() if of == dimension]))
    count: int | float = draw(st.integers(low, 50))
    if dimension == "time" or (dimension == "epochs" and len(kind.dimensions) > 1):
        count = draw(st.one_of(st.just(count), st.floats(0.01, 50)))
    return units.number(count) + draw(st.sampled_from(["", " "])) + unit


@st.composite
def entries(draw: st.DrawFn, declaration: type[Node], depth: int = 0) -> dict[str, str]:
    """Draws the entries of a block or call: all that are required, and some of the rest."""
    exclusive = declaration.exclusive
    given: dict[str, str] = {}
    for field in fields(declaration):
        hidden = field.name in (getattr(declaration, "whole", ""), "arguments")
        if hidden or not (field.required or draw(st.booleans())):
            continue
        if any(a in given or b in given for a, b in exclusive if field.name in (a, b)):
            continue
        given[field.word] = draw(_entry(field, depth))
    for group in declaration.one_of:
        if not any(name in given for name in group):
            chosen = draw(st.sampled_from([n for n in group if not any(
                n in pair and (pair[0] in given or pair[1] in given) for pair in exclusive)] or [""]))  # fmt: skip
            assume(chosen)
            given[chosen] = draw(_entry(next(f for f in fields(declaration) if f.name == chosen), depth))
    return {f.word: given[f.word] for f in fields(declaration) if f.word in given}


def _entry(field: Field, depth: int) -> st.SearchStrategy[str]:
    return values(field.kind, depth)


@st.composite
def calls(draw: st.DrawFn, declaration: type[Call], depth: int = 0) -> str:
    """Draws a call, its first arguments by position or all by name."""
    given = draw(entries(declaration, depth))
    names = [f.word for f in fields(declaration)]
    bare = 0
    while bare < len(names) and names[bare] in given and draw(st.booleans()):
        bare += 1
    written = [text if i < bare else f"{name} = {text}" for i, (name, text) in enumerate(given.items())]
    if declaration.open:
        extra = draw(st.dictionaries(_words.filter(lambda word: word not in names), values(AnyValue()), max_size=2))
        written += [f"{name} = {text}" for name, text in extra.items()]
    if not written and draw(st.booleans()):
        return declaration.word
    return f"{declaration.word}({', '.join(written)})"


@st.composite
def promises(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(list(PROMISES)))
    dimension = PROMISES[name]
    value = (
        str(draw(st.integers(0, 99)))
        if dimension is None
        else draw(_quantity(Measure(dimensions=(dimension,)), dimension))
    )
    return f"  {name} {draw(st.sampled_from(['<', '<=', '==', '>=', '>']))} {value}\n"


@st.composite
def job_texts(draw: st.DrawFn) -> str:
    """Draws the text of a job that loads without a mistake."""
    parts: list[str] = []
    for word, declaration in BLOCKS.items():
        required = declaration.one_of or any(f.required for f in fields(declaration))
        if declaration.whole and draw(st.integers(0, 3)) == 0:
            parts.append(f"{word} = {declaration.whole}\n")
        elif required or draw(st.booleans()):
            given: dict[str, Any] = draw(entries(declaration))
            parts.append(f"{word} {{\n" + "".join(f"  {name} = {text}\n" for name, text in given.items()) + "}\n")
    if draw(st.booleans()):
        parts.append("expect {\n" + "".join(draw(st.lists(promises(), max_size=3))) + "}\n")
    text = "\n".join(draw(st.permutations(parts)))
    # A condition between two fields: Nesterov's momentum needs a momentum.
    assume("sgd(" not in text or _loads(text))
    return text


def _loads(text: str) -> bool:
    return not load_text(text).report.errors


@st.composite
def job_specs(draw: st.DrawFn) -> JobSpec:
    """Draws a job that resolves without a mistake."""
    text = draw(job_texts())
    loaded = load_text(text)
    assert loaded.job is not None and not loaded.report.errors, (text, [d.message for d in loaded.report])
    return loaded.job


def networks(*, depth: int = 0) -> st.SearchStrategy[str]:
    """Draws texts of `model.network`: a network of the library, or a list of layers that may not fit one another."""
    declared = next(field for field in fields(BLOCKS["model"]) if field.word == "network")
    return values(declared.kind, depth)
