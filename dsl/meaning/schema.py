"""The language as declared in its registry: a JSON schema for tools, and the reference page for people.

In the schema a job is an object of blocks, a block an object of fields, and a quantity a text such as `76GiB`. A call
is the object `{"call": "adamw", "arguments": {"lr": 3e-4}}` or, without arguments, its name. `fragment` returns the
schema of one kind; the calls of a category are under `$defs`.

docs/reference.md is the output of `reference`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping

from dslc.dsl.bounds import ALL
from dslc.dsl.json_value import Json
from dslc.dsl.language import blocks, registry, units  # noqa: F401  (`blocks` fills the registry)
from dslc.dsl.language.suggest import RESERVED
from dslc.dsl.meaning.describe import CATEGORIES, describe
from dslc.dsl.meaning.resolve import PROMISE_DOCS, PROMISES
from dslc.dsl.meaning.write import value_text

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Json]:
    """Returns the JSON schema (draft 2020-12) of a job."""
    properties: dict[str, Json] = {"language": {"const": 1, "description": "the version of the language"}}
    for word, declaration in registry.BLOCKS.items():
        block = _object(declaration)
        properties[word] = {"anyOf": [{"const": declaration.whole}, block]} if declaration.whole else block
    properties["expect"] = {
        "type": "object",
        "description": "promises checked at compile time: an operator and a value for each name",
        "properties": {name: {"type": "string", "description": PROMISE_DOCS[name]} for name in PROMISES},
        "additionalProperties": False,
    }
    properties["sweep"] = {
        "type": "object",
        "description": "lists of alternatives by path: `train.optimizer.lr`",
        "additionalProperties": {"type": "array", "minItems": 1},
    }
    return {
        "$schema": DRAFT,
        "title": "dslc job",
        "type": "object",
        "properties": properties,
        "required": ["model", "data", "train"],
        "additionalProperties": False,
        "$defs": {
            category: {"anyOf": [_call(call) for call in calls.values()]} for category, calls in registry.CALLS.items()
        },
    }


def _object(declaration: type[registry.Node]) -> dict[str, Json]:
    shown = visible_fields(declaration)
    form: dict[str, Json] = {
        "type": "object",
        "description": declaration.doc,
        "properties": {f.word: {**fragment(f.kind), "description": f.doc} for f in shown},
        "additionalProperties": issubclass(declaration, registry.Call) and declaration.open,
    }
    required = [f.word for f in shown if f.required]
    if required:
        form["required"] = required
    if declaration.one_of:
        form["allOf"] = [{"anyOf": [{"required": [name]} for name in group]} for group in declaration.one_of]
    if declaration.exclusive:
        form["not"] = {"anyOf": [{"required": list(pair)} for pair in declaration.exclusive]}
    return form


def _call(call: type[registry.Call]) -> dict[str, Json]:
    required = any(f.required for f in visible_fields(call)) or bool(call.one_of)
    whole: dict[str, Json] = {
        "type": "object",
        "description": call.doc,
        "properties": {"call": {"const": call.word}, "arguments": _object(call)},
        "required": ["call", "arguments"] if required else ["call"],
        "additionalProperties": False,
    }
    return whole if required else {"anyOf": [{"const": call.word}, whole]}


def fragment(kind: registry.Kind) -> dict[str, Json]:  # noqa: C901 - one case for each kind
    """Returns the schema of the values that a kind takes."""
    match kind:
        case registry.Int():
            if kind.choices:
                return {"enum": list(kind.choices)}
            return _limited({"type": "integer"}, kind)
        case registry.Float():
            return _limited({"type": "number"}, kind)
        case registry.Bool():
            return {"type": "boolean"}
        case registry.Str():
            text: dict[str, Json] = {"type": "string"}
            if kind.pattern:
                text["pattern"] = f"^({kind.pattern})$"
            return text if kind.max_length is None else text | {"maxLength": kind.max_length}
        case registry.Path() | registry.Name():
            return {"type": "string"}
        case registry.Word():
            return {"enum": list(kind.choices)}
        case registry.Measure():
            return _quantity(kind)
        case registry.IntRange():
            return {"type": "string", "pattern": r"^\d+\.\.\d+$"}
        case registry.ListOf():
            sized: dict[str, Json] = {"type": "array", "items": fragment(kind.item)}
            if kind.length is not None:
                sized |= {"minItems": kind.length, "maxItems": kind.length}
            elif kind.min_length:
                sized["minItems"] = kind.min_length
            if kind.max_length is not None:
                sized["maxItems"] = kind.max_length
            return {"anyOf": [sized, fragment(kind.item)]} if kind.single else sized
        case registry.CallOf():
            references: list[dict[str, Json]] = [{"$ref": f"#/$defs/{category}"} for category in kind.categories]
            return references[0] if len(references) == 1 else {"anyOf": references}
        case registry.Either():
            return {"anyOf": [fragment(inner) for inner in kind.kinds]}
        case registry.AnyValue():
            return {"type": ["number", "string", "boolean", "null", "array"]}
    raise AssertionError(kind)


def _limited(form: dict[str, Json], kind: registry.NumberKind) -> dict[str, Json]:
    limits = {
        "minimum": kind.min, "maximum": kind.max, "exclusiveMinimum": kind.above, "exclusiveMaximum": kind.below,
    }  # fmt: skip
    return form | {name: limit for name, limit in limits.items() if limit is not None}


def _quantity(kind: registry.Measure) -> dict[str, Json]:
    known = [unit for unit, (dimension, _, _) in units.UNITS.items() if dimension in kind.dimensions]
    measured: dict[str, Json] = {"type": "string", "pattern": rf"^[0-9._eE+-]+ ?({'|'.join(known)})$"}
    if len(kind.dimensions) == 1 and kind.dimensions[0] in units.BARE:
        whole: dict[str, Json] = {"type": "number" if kind.dimensions[0] == "ratio" else "integer"}
        return {"anyOf": [_limited(whole, kind), measured]}
    return measured


# ------------------------------------------------------------------------------------------------------ reference

_INTRODUCTION = """\
# Reference

Every block, field and call of the job language, made from the declarations that `dslc` checks jobs by
(`dslc schema --markdown` prints this page). **Bold** is required. Arguments of a call are given by name, or by position
in the order listed; `f` means `f()`.
"""

_SWEEP = """\
### `sweep`

Lists of alternatives by path: `train.optimizer.lr = [1e-3, 1e-2]`. A path is a param, `block.field` or
`block.field.argument`.
"""


_BOUNDS = """`dslc check` may stand in front of other people's jobs: none makes it slow, large or talkative. Within
these bounds, which are far above what a training needs, a check takes less than 2 s of one core and 300 MB.
"""


def reference() -> str:
    """Returns the reference page, in Markdown."""
    parts = [_INTRODUCTION, "## Blocks\n"]
    for word, declaration in registry.BLOCKS.items():
        parts.append(f"### `{word}`\n\n{declaration.doc}\n")
        if declaration.whole:
            parts.append(f"`{word} = {declaration.whole}` leaves the whole block to the compiler.\n")
        parts.append(_notes(declaration) + _table(declaration))
    parts.append(_expect())
    parts.append(_SWEEP)
    parts.append("## Calls\n")
    for category, name in CATEGORIES.items():
        parts.append(f"### {name[0].upper()}{name[1:]}\n\n{_calls(registry.CALLS[category])}")
    parts.append(_units())
    parts.append(_bounds())
    parts.append(f"## Reserved\n\n{', '.join(f'`{word}`' for word in sorted(RESERVED))}: for later versions.\n")
    return "\n".join(parts)


def _bounds() -> str:
    rows = [f"| {bound.most:,} | {bound.what} | {bound.code} |" for bound in ALL]
    return "\n".join(["## Bounds\n", _BOUNDS, "| at most | of | else |", "| ---: | --- | --- |", *rows]) + "\n"


def visible_fields(declaration: type[registry.Node]) -> list[registry.Field]:
    """Returns the fields that a job can name."""
    hidden = {getattr(declaration, "whole", "")}
    if issubclass(declaration, registry.Call) and declaration.open:
        hidden.add("arguments")
    return [f for f in registry.fields(declaration) if f.name not in hidden]


def _table(declaration: type[registry.Node]) -> str:
    rows = ["| field | takes | default | means |", "| --- | --- | --- | --- |"]
    for f in visible_fields(declaration):
        required = f.required or any(f.name in group for group in declaration.one_of)
        name = f"**`{f.word}`**" if f.required else f"`{f.word}`"
        default = "required" if f.required else "" if required else default_text(f)
        rows.append("| " + " | ".join(_cell(text) for text in (name, describe(f.kind), default, f.doc)) + " |")
    return "\n".join(rows) + "\n"


def _notes(declaration: type[registry.Node]) -> str:
    sentences = [f"One of {_either(group)} must be given." for group in declaration.one_of]
    sentences += [f"{_either(pair, 'and')} exclude each other." for pair in declaration.exclusive]
    return " ".join(sentences) + "\n\n" if sentences else ""


def _either(names: tuple[str, ...], word: str = "or") -> str:
    return f" {word} ".join(f"`{name}`" for name in names)


def _calls(calls: Mapping[str, type[registry.Call]]) -> str:
    """Returns one table for the calls of a category: a row for each call, and below it for each argument."""
    rows = ["| call | argument | takes | default | means |", "| --- | --- | --- | --- | --- |"]
    for call in calls.values():
        sentences = [call.doc, _notes(call).strip()]
        if call.open:
            further = next(f.doc for f in registry.fields(call) if f.name == "arguments")
            sentences.append(f"Further arguments, by name: {further}.")
        rows.append(f"| **`{call.word}`** | | | | {_cell(' '.join(filter(None, sentences)))} |")
        for f in visible_fields(call):
            default = "required" if f.required else default_text(f)
            cells = (f"`{f.word}`", describe(f.kind), default, f.doc)
            rows.append("| | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(rows) + "\n"


def default_text(field: registry.Field) -> str:
    """Returns the default of a field in Markdown: code, or words."""
    if field.shown:
        return field.shown
    return "none" if field.default is None else f"`{value_text(field.default, field.kind)}`"


def _expect() -> str:
    rows = ["| name | takes | means |", "| --- | --- | --- |"]
    for name, dimension in PROMISES.items():
        takes = "a number" if dimension is None else f"{units.NAMES[dimension]}, such as `{units.EXAMPLES[dimension]}`"
        rows.append(f"| `{name}` | {takes} | {PROMISE_DOCS[name]} |")
    table = "\n".join(rows)
    return f"### `expect`\n\nPromises checked at compile time, with `<`, `<=`, `==`, `>=` and `>`.\n\n{table}\n"


def _units() -> str:
    rows = ["| dimension | units |", "| --- | --- |"]
    for dimension, name in units.NAMES.items():
        known = ", ".join(f"`{unit}`" for unit, (of, _, _) in units.UNITS.items() if of == dimension)
        rows.append(f"| {name} | {known} |")
    table = "\n".join(rows)
    return f"## Units\n\nCase counts: `kB` is 1000 bytes, `KiB` 1024, `Gbps` counts bits.\n\n{table}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
