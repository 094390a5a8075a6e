"""The settings of the jobs of runs, and those in which the jobs differ.

Model: a run directory holds the job as resolved, `job.plt`. A setting is a field of a block, or an argument of a call
there: `train.optimizer` is `sgd`, and `train.optimizer.lr` is `0.1`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dslc.compiler.facts.untrusted_files import read_text
from dslc.dsl.bounds import BYTES
from dslc.dsl.language import registry
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.load import load_kept
from dslc.dsl.meaning.write import value_text

JOB = "job.plt"
_MOST_LETTERS = 200  # of a setting; the rest of a list of layers is left out


@dataclass(frozen=True, kw_only=True)
class SettingValue:
    """A setting as the language writes it; for a number also its value, and what it counts: `steps`, `bytes`."""

    text: str
    number: float | None = None
    dimension: str = ""


def read_job(folder: str, settings: Sequence[str] = ()) -> JobSpec | None:
    """Returns a run's job with other `settings`, from `job.plt` alone; None without one that this dslc reads."""
    try:
        text = read_text(os.path.join(folder, JOB), BYTES.most)
    except (OSError, ValueError):
        return None
    loaded = load_kept({JOB: text}, os.path.join(folder, JOB), settings, folder)
    return None if loaded.report.errors else loaded.job


def job_settings(job: JobSpec) -> dict[str, SettingValue]:
    """Returns the settings of a resolved job by path, in the order of the language."""
    settings = {}
    for word in registry.BLOCKS:
        block = getattr(job, word)
        for field in registry.fields(type(block)):
            if field.name in block.auto_fields:
                settings[f"{word}.{field.word}"] = SettingValue(text=registry.AUTO)
            elif field.name != type(block).whole:
                settings |= _values(f"{word}.{field.word}", getattr(block, field.name), field.kind)
    return settings


def differing_settings(jobs: Iterable[Mapping[str, SettingValue]]) -> list[str]:
    """Returns the paths of the settings that are not the same in all jobs. Jobs that have another call than others may
    lack its arguments: those are compared among the jobs that have them.
    """
    jobs = list(jobs)
    paths = dict.fromkeys(path for job in jobs for path in job)
    differing = list[str]()
    for path in paths:
        texts = {job[path].text if path in job else None for job in jobs}
        if path.rpartition(".")[0] in differing:
            texts.discard(None)
        if len(texts) > 1:
            differing.append(path)
    return differing


def comparable_settings(jobs: Iterable[Mapping[str, SettingValue]]) -> set[str]:
    """Returns the paths of the settings that are numbers of one dimension in all jobs that have them."""
    jobs = list(jobs)
    paths = {path for job in jobs for path in job}
    dimensions = {path: {_dimension(job[path]) for job in jobs if path in job} for path in paths}
    return {path for path, found in dimensions.items() if len(found) == 1 and None not in found}


def _dimension(value: SettingValue) -> str | None:
    return None if value.number is None else value.dimension


def _values(path: str, value: object, kind: registry.Kind) -> Iterator[tuple[str, SettingValue]]:
    if value is None or value == ():
        return
    if not isinstance(value, registry.Call):
        text = " ".join(value_text(value, kind).split())
        shown = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
        number, dimension = _number(value)
        yield path, SettingValue(text=shown, number=number, dimension=dimension)
        return
    yield path, SettingValue(text=value.word)
    for field in registry.fields(type(value)):
        argument = getattr(value, field.name)
        if value.open and field.name == "arguments":
            for name, each in argument:
                yield from _values(f"{path}.{name}", each, registry.AnyValue())
        else:
            yield from _values(f"{path}.{field.word}", argument, field.kind)


def _number(value: object) -> tuple[float | None, str]:
    if isinstance(value, registry.Quantity):
        return value.value, value.dimension
    return (value, "") if isinstance(value, int | float) and not isinstance(value, bool) else (None, "")
