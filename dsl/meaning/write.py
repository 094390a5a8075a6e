"""Writes the resolved job as text: the `job.plt` of a run.

`language = 1` and every block with its defaults written out; imports, params and `--set` are resolved away, paths are
absolute, quantities in a suitable unit. Values not given (`none`) are left out.

    load_text(write(job), folder=job.folder).job == job          spans, and the name of the file, do not count
    load_text(write(anchored(job)), folder=any) is the same job: files beside it are named with their folder
    write(job) is as `dslc fmt` would lay it out

Limits: a `sweep` is not written: the job is one of its combinations, and a run's folder belongs to one.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any, TypeVar

from dslc.dsl.language import registry, units
from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.job import JobSpec, with_calls
from dslc.dsl.language.layers import TransformersNetwork
from dslc.dsl.meaning.describe import value as plain
from dslc.dsl.meaning.resolve import PROMISES
from dslc.dsl.syntax.mistakes import OTHER_LITERALS
from dslc.dsl.words import quoted

T = TypeVar("T")

_WORDS = frozenset({"true", "false", "none", "param", "import", *OTHER_LITERALS})  # no names without quotes
_PLAIN = frozenset({"metric", "lr_schedule", "precision"})  # these read better without empty parentheses


def write(job: JobSpec) -> str:
    """Returns the text of a job file for the job, all defaults included."""
    parts = ["language = 1\n"]
    parts.extend(_block(getattr(job, word)) for word in registry.BLOCKS)
    if job.expect:
        promises = []
        for promise in job.expect:
            dimension = PROMISES[promise.name]
            value = units.number(promise.value) if dimension is None else units.write(promise.value, dimension)
            promises.append(f"  {promise.name} {promise.operator} {value}\n")
        parts.append(f"expect {{\n{''.join(promises)}}}\n")
    return _laid_out("\n".join(parts))


def anchored(job: JobSpec) -> JobSpec:
    """Returns the job for a file elsewhere: functions and configurations beside the job get its folder."""

    def absolute_path(name: str) -> str:
        return os.path.normpath(os.path.join(job.folder, os.path.expanduser(name)))

    def with_absolute_paths(call: registry.Call) -> registry.Call:
        if isinstance(call, TransformersNetwork) and os.path.exists(absolute_path(call.path)):
            return replace(call, path=absolute_path(call.path))
        if not isinstance(call, PythonCall):
            return call
        inside, _, function = call.function.rpartition("/")
        folder = absolute_path(inside)
        module = os.path.join(folder, function.partition(":")[0].partition(".")[0])
        if not (os.path.isdir(module) or os.path.exists(f"{module}.py")):
            return call
        return replace(call, function=os.path.join(folder, function))

    return with_calls(job, with_absolute_paths)


def _laid_out(text: str) -> str:
    from dslc.dsl.diagnostics import Report
    from dslc.dsl.source import Source
    from dslc.dsl.syntax.format import format_document
    from dslc.dsl.syntax.parser import parse

    report = Report()
    document = parse(Source("job.plt", text), report)
    assert document is not None and not report, [d.message for d in report]
    return format_document(document)


def _block(block: registry.Block) -> str:
    declaration = type(block)
    if declaration.whole and getattr(block, declaration.whole):
        return f"{declaration.word} = {declaration.whole}\n"
    lines = []
    for field in registry.fields(declaration):
        value = getattr(block, field.name)
        if field.name in block.auto_fields:
            lines.append(f"  {field.word} = {registry.AUTO}\n")
        elif value is not None and field.name != declaration.whole:
            lines.append(f"  {field.word} = {value_text(value, field.kind)}\n")
    return f"{declaration.word} {{\n{''.join(lines)}}}\n"


def value_text(value: Any, kind: registry.Kind) -> str:
    match kind:
        case registry.Either():
            return value_text(value, next(inner for inner in kind.kinds if _holds(inner, value)))
        case registry.Measure():
            if isinstance(value, registry.Quantity):
                return units.write(value.value, value.dimension)
            return units.write(value, kind.dimensions[0])
        case registry.Word():
            return str(value)
        case registry.Name():
            return value if re.fullmatch(r"[A-Za-z_]\w*", value, re.ASCII) and value not in _WORDS else quoted(value)
        case registry.ListOf():
            items = [value_text(item, kind.item) for item in value]
            if value and isinstance(value[0], registry.Call) and value[0].category == "layer":
                return "[\n" + "".join(f"    {item},\n" for item in items) + "  ]"
            return f"[{', '.join(items)}]"
        case registry.CallOf():
            return _call(value)
        case _:
            return plain(value)


def _call(call: registry.Call) -> str:
    arguments: list[str] = []
    for field in registry.fields(type(call)):
        value = getattr(call, field.name)
        if call.open and field.name == "arguments":
            arguments.extend(f"{name} = {value_text(argument, registry.AnyValue())}" for name, argument in value)
        elif value is not None:
            arguments.append(f"{field.word} = {value_text(value, field.kind)}")
    if not arguments and call.category in _PLAIN:
        return call.word
    return f"{call.word}({', '.join(arguments)})"


def _holds(kind: registry.Kind, value: object) -> bool:
    """True if a resolved value came from this kind."""
    match kind:
        case registry.Word():
            return isinstance(value, str) and value in kind.choices
        case registry.Str() | registry.Path() | registry.Name():
            return isinstance(value, str)
        case registry.ListOf():
            return isinstance(value, tuple)
        case registry.CallOf():
            return isinstance(value, registry.Call) and value.category in kind.categories
        case registry.IntRange():
            return isinstance(value, registry.Range)
        case registry.Bool():
            return isinstance(value, bool)
        case _:
            return isinstance(value, int | float | registry.Quantity) and not isinstance(value, bool)
