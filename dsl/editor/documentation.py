"""The registry's documentation of a block, field, call, argument, promise or unit, in Markdown."""

from __future__ import annotations

from dslc.dsl.language import units
from dslc.dsl.language.registry import BLOCKS, Call, Dimension, Field, Node
from dslc.dsl.meaning.describe import category, describe
from dslc.dsl.meaning.resolve import PROMISE_DOCS, PROMISES
from dslc.dsl.meaning.schema import default_text, visible_fields

KEYWORD_DOCS = {
    "param": "A value with a name, used below and set by `--set name=value`: `param width = 256`.",
    "import": "Takes all blocks of another file, which the lines below override: `import \"base.plt\"`.",
    "language": "The version of the language: `language = 1`.",
    "expect": "Promises checked at compile time, with `<`, `<=`, `==`, `>=` and `>`.",
    "sweep": "Lists of alternatives by path: `train.optimizer.lr = [1e-3, 1e-2]`.",
}  # fmt: skip

_BASE_UNITS: dict[Dimension, str] = {
    "bytes": "bytes", "time": "seconds", "steps": "steps", "epochs": "epochs", "ratio": "of the whole",
    "bandwidth": "bytes per second", "flops": "FLOP/s",
}  # fmt: skip


def block_text(word: str) -> str:
    if word not in BLOCKS:
        return KEYWORD_DOCS.get(word, "")
    declaration = BLOCKS[word]
    lines = [declaration.doc]
    if declaration.whole:
        lines.append(f"`{word} = {declaration.whole}` leaves the whole block to the compiler.")
    names = ", ".join(f"`{f.word}`" for f in visible_fields(declaration))
    return "\n\n".join([*lines, f"Fields: {names}."])


def field_text(field: Field, owner: str) -> str:
    """Documents a field of a block, or an argument of a call: what it means, what it takes, its default."""
    default = "required" if field.required else f"default: {default_text(field)}"
    return f"`{owner}{field.word}`: {field.doc}.\n\nTakes {describe(field.kind)}; {default}."


def call_text(call: type[Call]) -> str:
    """Documents a call with its arguments."""
    rows = [f"- `{f.word}`: {f.doc} ({_default(f)})" for f in visible_fields(call)]
    return "\n".join([f"`{signature(call)}`, {category(call.category)}.", "", call.doc, *([""] if rows else []), *rows])


def signature(call: type[Node]) -> str:
    """Returns the call with its arguments: `adamw(lr = 0.001, betas = [0.9, 0.999])`."""
    parts = [f.word if f.required else f"{f.word} = {default_text(f).strip('`')}" for f in visible_fields(call)]
    return f"{call.word}({', '.join(parts)})"


def promise_text(name: str) -> str:
    """Documents a promise of `expect`."""
    dimension = PROMISES[name]
    takes = "a number" if dimension is None else f"{units.NAMES[dimension]}, such as `{units.EXAMPLES[dimension]}`"
    return f"`{name}`: {PROMISE_DOCS[name]}.\n\nTakes {takes}."


def unit_text(unit: str) -> str:
    """Documents a unit: `MiB` is 1,048,576 bytes."""
    quantity = units.in_base_units(1, unit)
    return f"`1 {unit}` is {quantity.value:,} {_BASE_UNITS[quantity.dimension]}." if quantity else ""


def _default(field: Field) -> str:
    return "required" if field.required else f"default: {default_text(field)}"
