"""Hovers: what a word of the job means, its default and its resolved value, and the cost of a layer."""

from __future__ import annotations

import os

from dslc.dsl.editor import documentation
from dslc.dsl.editor.figures import JobFigures, LayerFigures
from dslc.dsl.editor.kinds import call_of, field_of, flat_kinds, named_field, open_call, value_kind
from dslc.dsl.editor.scopes import ScopedToken
from dslc.dsl.editor.snapshot import Snapshot
from dslc.dsl.language.registry import CallOf
from dslc.dsl.meaning.resolve import PROMISES
from dslc.dsl.meaning.write import value_text
from dslc.dsl.record import Record, record
from dslc.dsl.syntax.lexer import NUMBER_PART


@record
class Hover(Record):
    """Markdown for the characters `start` to `end`."""

    text: str
    start: int
    end: int


def hover(snapshot: Snapshot, offset: int, figures: JobFigures | None = None) -> Hover | None:
    """Returns what is known of the word at an offset; None for a sign, a comment or an unknown word."""
    scoped = snapshot.token_at(offset)
    if scoped is None:
        return None
    parts = [_meaning(snapshot, scoped), _cost(snapshot, scoped, figures)]
    text = "\n\n".join(part for part in parts if part)
    return Hover(text=text, start=scoped.token.start, end=scoped.token.end) if text else None


def _meaning(snapshot: Snapshot, scoped: ScopedToken) -> str:
    token, role, scope = scoped
    match role:
        case "keyword":
            return documentation.KEYWORD_DOCS.get(token.text, "")
        case "block":
            return documentation.block_text(token.text)
        case "field" if scope.block == "expect":
            return documentation.promise_text(token.text) if token.text in PROMISES else ""
        case "field":
            return _field(snapshot, (scope.block, *scope.path, token.text))
        case "argument":
            call = open_call(scope)
            field = named_field(call, token.text) if call else None
            return documentation.field_text(field, f"{call.word}.") if call and field else ""
        case "param":
            return _param(snapshot, token.text)
        case "call" | "name":
            if role == "name" and token.text in snapshot.params:
                return _param(snapshot, token.text)
            kind = value_kind(scope)
            calls = role == "call" or any(isinstance(inner, CallOf) for inner in flat_kinds(kind))
            called = call_of(kind, token.text) if calls else None
            return documentation.call_text(called) if called else _word(snapshot, scoped)
        case "number":
            number = NUMBER_PART.match(token.text)
            return documentation.unit_text(token.text[number.end() :].strip()) if number else ""
    return ""


def _word(snapshot: Snapshot, scoped: ScopedToken) -> str:
    scope = scoped.scope
    field = field_of(scope.block, scope.path[0]) if scope.path and not scope.brackets else None
    return documentation.field_text(field, f"{scope.block}.") if field else ""


def _field(snapshot: Snapshot, path: tuple[str, ...]) -> str:
    """Documents a field or, in `sweep`, a part of a path."""
    if path[0] == "sweep":
        path = path[1:]
        if len(path) == 1:
            return documentation.block_text(path[0]) or _param(snapshot, path[0])
    field = field_of(path[0], path[1]) if len(path) > 1 else None
    if field is None or len(path) > 2:
        return ""
    text = documentation.field_text(field, f"{path[0]}.")
    loaded = snapshot.last_good
    if loaded is None or loaded.job is None:
        return text
    block = getattr(loaded.job, path[0])
    if path[1] in block.auto_fields:
        return text
    value = getattr(block, field.name)
    written = "none" if value is None else value_text(value, field.kind)
    origin = _short(loaded.origins.get(".".join(path), "default"), snapshot)
    return f"{text}\n\nValue: `{' '.join(written.split())}`, from {origin}."


def _param(snapshot: Snapshot, name: str) -> str:
    if name not in snapshot.params:
        return ""
    value = snapshot.params[name]
    origin = _short((snapshot.last_good or snapshot.loaded).origins.get(name, ""), snapshot)
    return f"`param {name}{' = ' + value if value else ''}`" + (f", from {origin}." if origin else ".")


def _short(origin: str, snapshot: Snapshot) -> str:
    """Returns an origin with its path from the job's folder."""
    return origin.removeprefix(f"{snapshot.folder}{os.sep}")


# ----------------------------------------------------------------------------------------------------------- costs


def _cost(snapshot: Snapshot, scoped: ScopedToken, figures: JobFigures | None) -> str:
    if figures is None:
        return ""
    token, role, _ = scoped
    if role in ("call", "name"):
        layer = next((f for start, _, f in placed_layers(snapshot, figures) if start == token.start), None)
        return layer_text(layer) if layer else ""
    return rank_text(figures) if role == "block" and token.text == "devices" else ""


def placed_layers(snapshot: Snapshot, figures: JobFigures) -> list[tuple[int, int, LayerFigures]]:
    """Returns start and end of each layer whose statement has not changed since the analysis."""
    regions = {region.text: region.start for region in snapshot.regions}
    return [
        (regions[layer.region] + layer.start, regions[layer.region] + layer.end, layer)
        for layer in figures.layers
        if layer.region in regions
    ]


def layer_text(layer: LayerFigures) -> str:
    """Returns the shapes and the cost of a layer."""
    times = f", {layer.count} times" if layer.count > 1 else ""
    return (
        f"Shape: {layer.input} → {layer.output}{times}. Parameters: {layer.parameters}.\n\n"
        f"One sample: {layer.forward} forward, {layer.backward} backward, {layer.saved} kept for the backward pass."
    )


def rank_text(figures: JobFigures) -> str:
    """Returns the size and the cost of one rank."""
    rows = [("ranks", figures.ranks), ("parameters", figures.parameters), ("batch of a rank", figures.batch),
            ("micro-batch", figures.microbatch), ("peak memory", figures.peak),
            ("expected step time", figures.step_time)]  # fmt: skip
    return "\n".join(f"- {name}: {value}" for name, value in rows if value)
