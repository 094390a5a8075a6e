"""Strategies of hypothesis over one job: values of its fields, and plans for its devices. Both shrink to small ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from dslc.dsl.language import blocks  # noqa: F401  (`blocks` fills the registry)
from dslc.dsl.language.registry import BLOCKS
from dslc.dsl.language.suggest import did_you_mean, words_of
from dslc.dsl.meaning.load import load
from dslc.dsl.words import listed
from dslc.testing.job_variants import JobVariant, load_variant

# What a value is drawn from: a strategy, a range, or some values, the simplest first.
Values: TypeAlias = st.SearchStrategy[object] | range | Sequence[object]
AXES = ("pipeline", "tensor", "context")


def vary(
    job: str | os.PathLike[str], paths: Mapping[str, Values] | None = None, /, **fields: Values
) -> st.SearchStrategy[JobVariant]:
    """Draws the job with values for some fields. A field is named alone, `nodes`, or by its path in `paths`,
    `{"train.optimizer.lr": [0.1, 0.2]}`; a param by its name.
    """
    known = load(os.fspath(job)).origins
    named = {_path_of(name, known): values for name, values in fields.items()} | dict(paths or {})
    drawn = st.fixed_dictionaries({path: _strategy(values) for path, values in named.items()})
    return drawn.map(lambda values: load_variant(job, values))


def draw_plans(
    job: str | os.PathLike[str],
    *,
    devices: Values = range(1, 9),
    axes: Sequence[str] = AXES,
    **fields: Values,
) -> st.SearchStrategy[JobVariant]:
    """Draws plans for the job: a number of devices, how they are shared out over the data axis and some others, what is
    sharded, and micro-batches. `fields` vary as in `vary`. Not every plan is accepted: `assume_accepted` draws others.
    """
    loaded = load(os.fspath(job))
    field = "gpus" if loaded.job is not None and loaded.job.devices.gpus is not None else "cpus"
    if unknown := set(axes) - set(AXES):
        raise ValueError(f"`{min(unknown)}` is no axis: there is {listed(AXES)}")
    more = {_path_of(name, loaded.origins): _strategy(values) for name, values in fields.items()}
    return _plans(os.fspath(job), f"devices.{field}", _strategy(devices), tuple(axes), more)


@st.composite
def _plans(
    draw: st.DrawFn,
    job: str,
    field: str,
    devices: st.SearchStrategy[object],
    axes: tuple[str, ...],
    more: Mapping[str, st.SearchStrategy[object]],
) -> JobVariant:
    count = draw(devices)
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{count!r} is no number of devices")
    values: dict[str, object] = {field: count}
    rest = count
    for axis in axes:
        size = draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        values[f"parallelism.{axis}"] = size
        rest //= size
    values["parallelism.data"] = rest
    values["parallelism.zero"] = draw(st.integers(0, 3)) if rest > 1 else 0
    values["parallelism.microbatches"] = draw(st.sampled_from([1, 2, 4, 8]))
    return load_variant(job, values | draw(st.fixed_dictionaries(dict(more))))


def _strategy(values: Values) -> st.SearchStrategy[object]:
    if isinstance(values, st.SearchStrategy):
        return values
    if isinstance(values, range) and values.step == 1 and values:
        return st.integers(values.start, values.stop - 1)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise TypeError(f"{values!r} is neither a strategy nor a range or list of values")
    return st.sampled_from(values)


def _path_of(name: str, known: Mapping[str, str]) -> str:
    """Returns the path of a param or field that is named alone. Raises ValueError with a remedy for another name."""
    if name in known:
        return name
    found = [f"{word}.{name}" for word, declaration in BLOCKS.items() if name in words_of(declaration)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f'`{name}` is {listed(found)}: name the path, as in `vary(job, {{"{found[0]}": …}})`')
    meant = did_you_mean(name, [word for declaration in BLOCKS.values() for word in words_of(declaration)])
    raise ValueError(f"no block has a field `{name}`, and the job no such param{f': {meant}' if meant else ''}")
