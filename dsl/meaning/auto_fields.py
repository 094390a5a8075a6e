"""The fields that a job leaves to the compiler, and jobs with values in their place.

`parallelism = auto` and `memory = auto` leave the whole block, `tensor = auto` a single field. A job with values in
their place is the job that a user would have written: it differs from it in no rule and in no figure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from dslc.dsl.language import units
from dslc.dsl.language.blocks import MemorySpec, ParallelismSpec, RecomputeBudget
from dslc.dsl.language.calls import EveryNthBlock
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Place, fields
from dslc.dsl.source import Span

# The fields that the compiler may choose, by path: none of them changes what a training means.
SEARCHED = tuple(f"{block.word}.{name}" for block in (ParallelismSpec, MemorySpec) for name in block.searched)


def auto_fields(job: JobSpec) -> tuple[str, ...]:
    """Returns the paths of the fields that the job leaves to the compiler."""
    return tuple(path for path in SEARCHED if _block_of(job, path).is_auto(path.partition(".")[2]))


def auto_span(job: JobSpec) -> Span | None:
    """Returns the place of the first `auto`."""
    first = next(iter(auto_fields(job)), "")
    return _block_of(job, first).value_span(first.partition(".")[2]) if first else None


def with_values(job: JobSpec, values: Mapping[str, object]) -> JobSpec:
    """Returns the job with these values of fields, by path, as if they were written; it leaves none to the compiler."""
    made = {}
    for word in ("parallelism", "memory"):
        block = getattr(job, word)
        written = {path.partition(".")[2]: value for path, value in values.items() if path.startswith(f"{word}.")}
        places = {name: place for name, place in block.places.items() if name not in block.auto_fields}
        for name in written:
            if block.value_span(name) is not None:
                places[name] = block.places.get(name) or Place(block.span, block.span, "auto")
        changes: dict[str, Any] = {**written, "auto": False, "auto_fields": (), "places": places}
        made[word] = replace(block, **changes)
    return replace(job, **made)


def with_defaults(job: JobSpec, paths: Collection[str]) -> JobSpec:
    """Returns the job as if it did not name these fields, nor leave any to the compiler."""
    reset = with_values(job, {path: default_of(path) for path in paths})
    blocks: dict[str, Any] = {}
    for word in ("parallelism", "memory"):
        block = getattr(reset, word)
        places = {name: place for name, place in block.places.items() if f"{word}.{name}" not in paths}
        blocks[word] = replace(block, places=places)
    return replace(reset, **blocks)


def without_auto(job: JobSpec) -> JobSpec:
    """Returns the job with the default of each field that it leaves to the compiler: all devices are data ranks."""
    paths = auto_fields(job)
    return with_defaults(job, paths) if paths else job


def default_of(path: str) -> object:
    """Returns the default of a searched field."""
    word, _, name = path.partition(".")
    declaration = ParallelismSpec if word == "parallelism" else MemorySpec
    return next(field.default for field in fields(declaration) if field.name == name)


def value_text(value: object) -> str:
    """Writes the value of a searched field in the language."""
    if isinstance(value, EveryNthBlock):
        return f"every({value.n})"
    if isinstance(value, RecomputeBudget):
        return f"budget({units.write(value.peak, 'bytes')})"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


def settings_text(values: Mapping[str, object]) -> tuple[str, ...]:
    """Returns the values as `--set` takes them."""
    return tuple(f"{path}={value_text(value)}" for path, value in values.items() if value is not None)


def _block_of(job: JobSpec, path: str) -> ParallelismSpec | MemorySpec:
    return job.parallelism if path.startswith("parallelism.") else job.memory
