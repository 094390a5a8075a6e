"""Compares forms of expressions with kinds: which fit, the words of a kind, and how to rewrite one form as another.

Nothing here evaluates; callers remove params and parentheses first.
"""

from __future__ import annotations

import re

from dslc.dsl.language import registry, units
from dslc.dsl.language.suggest import translated_choice, write_instead
from dslc.dsl.remedy import Edit, join_remedies, remedy, replace_text
from dslc.dsl.source import Span
from dslc.dsl.syntax import tree
from dslc.dsl.words import quoted


def spelt(expr: tree.Expr) -> str:
    """Returns the word that an expression is: `none`, `gpipe`, and `1f1b`, which the grammar parses as a quantity."""
    match expr:
        case tree.Name():
            return expr.name
        case tree.NumberWithUnit() if expr.joined:
            return expr.text + expr.unit
        case tree.NoneLiteral():
            return "none"
        case tree.Boolean():
            return "true" if expr.value else "false"
    return ""


def numeric(expr: tree.Expr) -> bool:
    return isinstance(expr, tree.Number | tree.NumberWithUnit | tree.Unary | tree.Binary | tree.Group)


def fits(expr: tree.Expr, kind: registry.Kind) -> bool:
    """True if the kind takes a value of this form; callers remove params and parentheses first."""
    match kind:
        case registry.Int() | registry.Float() | registry.Measure():
            return numeric(expr)
        case registry.Bool():
            return isinstance(expr, tree.Boolean)
        case registry.Str() | registry.Path():
            return isinstance(expr, tree.Text)
        case registry.Word():
            return spelt(expr) in kind.choices
        case registry.Name():
            return isinstance(expr, tree.Text) or bool(spelt(expr))
        case registry.IntRange():
            return isinstance(expr, tree.RangeOf)
        case registry.ListOf():
            return isinstance(expr, tree.List) or (kind.single and fits(expr, kind.item))
        case registry.CallOf():
            if isinstance(expr, tree.CallOf):
                return True
            return isinstance(expr, tree.Name) and expr.name in words_in(kind)
        case registry.Either():
            return any(fits(expr, inner) for inner in kind.kinds)
    return True


def words_in(kind: registry.Kind) -> list[str]:
    """Returns the words, and the names of calls, that a value of this kind may be."""
    match kind:
        case registry.Word():
            return list(kind.choices)
        case registry.CallOf():
            return [word for category in kind.categories for word in registry.CALLS[category]]
        case registry.Either():
            return [word for inner in kind.kinds for word in words_in(inner)]
        case registry.ListOf() if kind.single:
            return words_in(kind.item)
    return []


def bare_words(kind: registry.Kind) -> list[str]:
    """Returns the words that are no calls."""
    if isinstance(kind, registry.Either):
        return [word for inner in kind.kinds for word in bare_words(inner)]
    if isinstance(kind, registry.ListOf) and kind.single:
        return bare_words(kind.item)
    return list(kind.choices) if isinstance(kind, registry.Word) else []


def with_unit(found: int | float, kind: registry.Measure, place: Span) -> str:
    """Returns the bare number, which stands at a place, with the units that may have been meant."""
    written = units.number(found)

    def instead(text: str) -> Edit | str:
        return replace_text(place, text)

    if "ratio" in kind.dimensions and 0 < found < 1:
        return remedy(instead(units.write(float(found), "ratio")))
    match kind.dimensions[0]:
        case "bytes":
            return remedy(instead(f"{written}GiB"), ", ", instead(f"{written}MiB"), " or another unit")
        case "time":
            return remedy(instead(f"{written}s"), ", ", instead(f"{written}min"), " or ", instead(f"{written}h"))
        case "steps" | "epochs":
            counted = [dimension for dimension in kind.dimensions if dimension in ("steps", "epochs")]
            return join_remedies(" or ", [remedy(instead(units.write(found, dimension))) for dimension in counted])
        case dimension:
            return f"it as `{units.EXAMPLES[dimension]}` is written"


def accepts(kind: registry.Kind, *types: type[registry.Kind]) -> bool:
    if isinstance(kind, registry.Either):
        return any(accepts(inner, *types) for inner in kind.kinds)
    return isinstance(kind, types)


def takes_text(kind: registry.Kind, text: str) -> bool:
    """Returns True if a value of this kind may be this text, in quotes."""
    if isinstance(kind, registry.Either):
        return any(takes_text(inner, text) for inner in kind.kinds)
    if isinstance(kind, registry.Str):
        return not kind.pattern or bool(re.fullmatch(kind.pattern, text))
    return isinstance(kind, registry.Path | registry.AnyValue)


def inside(expr: tree.Expr) -> tree.Expr:
    while isinstance(expr, tree.Group):
        expr = expr.inner
    return expr


def rewrite(expr: tree.Expr, kind: registry.Kind) -> str:
    if isinstance(kind, registry.Either):
        return next((help for inner in kind.kinds if (help := rewrite(expr, inner))), "")
    text = quoted(expr.value) if isinstance(expr, tree.Text) else expr.span.text()
    if len(text) > 60 or "\n" in text:
        return ""
    if isinstance(kind, registry.ListOf) and not isinstance(expr, tree.List) and fits(expr, kind.item):
        if (kind.length or kind.min_length) > 1:
            return f"write `[{text}, …]`"
        return write_instead(expr.span, f"[{text}]")
    if not isinstance(expr, tree.Name) and (meant := translated_choice(text.strip('"'), words_in(kind))):
        return write_instead(expr.span, meant)
    if isinstance(expr, tree.List) and len(expr.items) == 1 and fits(expr.items[0], kind):
        return write_instead(expr.span, expr.items[0].span.text())
    if isinstance(expr, tree.Text):
        inner = expr.value
        if isinstance(kind, registry.Int) and re.fullmatch(r"-?\d+", inner):
            return _without_quotes(expr.span, inner)
        if isinstance(kind, registry.Float) and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", inner):
            return _without_quotes(expr.span, inner)
        if isinstance(kind, registry.Bool) and inner.lower() in ("true", "false"):
            return _without_quotes(expr.span, inner.lower())
        if inner in words_in(kind):
            return _without_quotes(expr.span, inner)
        if isinstance(kind, registry.CallOf) and (call := as_call(inner, kind)):
            return write_instead(expr.span, call)
    if isinstance(kind, registry.Bool) and isinstance(expr, tree.Number) and expr.value in (0, 1):
        return write_instead(expr.span, "true" if expr.value else "false")
    if isinstance(kind, registry.Str | registry.Path) and numeric(expr):
        return write_instead(expr.span, f'"{text}"')
    return ""


def _without_quotes(place: Span, value: str) -> str:
    return remedy(write_instead(place, value), ", without quotes")


# The source for a file, by the suffix of its name.
_OPENS = {".txt": "text", ".bin": "tokens", ".npz": "arrays", ".parquet": "parquet"}
_READS = {".csv": "csv", ".json": "json", ".jsonl": "json"}


def as_call(text: str, kind: registry.CallOf) -> str:
    """Returns the call for which a path or a name, written in its place, is probably an argument; "" for none."""
    words, ending = words_in(kind), text[text.rfind(".") :] if "." in text else ""
    if "python" in words and re.fullmatch(r"(.*/)?[\w.]+:[\w.]+", text):
        return f"python({quoted(text)})"
    if "network" in kind.categories and " " not in text:
        return f"transformers({quoted(text)})"
    if "source" not in kind.categories:
        return ""
    if ending in _READS:
        return f'datasets("{_READS[ending]}", data_files = {quoted(text if "/" in text else f"./{text}")})'
    if ending in _OPENS or text.startswith(("/", "./", "../", "~")):
        return f"{_OPENS.get(ending, 'images')}({quoted(text)})"
    return f"datasets({quoted(text)})"
