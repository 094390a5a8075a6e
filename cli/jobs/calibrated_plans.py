"""The plans that `dslc calibrate` measures: the job's own, and for a job with `auto` more of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import auto_fields, value_text, with_values, without_auto

Settings = Mapping[str, object]  # values of searched fields, by path


def further_plans(job: JobSpec, world_size: int) -> Iterator[tuple[Settings, ...]]:
    """Yields the plans beyond the job with its defaults that tell the times of the other ones that `auto` may take.

    These are plans with an engine of their own, each with few and with many micro-batches, and plans with other layers.
    Of several settings the first that rules accept is to be measured.
    """
    searched = auto_fields(job)
    engines: list[Settings] = [{}, {"parallelism.zero": 3}]
    engines += [{"parallelism.pipeline": stages} for stages in sorted({2, world_size} - {1})]
    plans: list[tuple[Settings, ...]] = []
    for engine in engines:
        stages = engine.get("parallelism.pipeline", 1)
        assert isinstance(stages, int)
        few, *many = ({**engine, "parallelism.microbatches": times * stages} for times in (1, 4, 2))
        plans += [(few if few.keys() <= set(searched) else engine,)] if engine else []
        plans.append(tuple(many))
    plans += [
        ({"parallelism.zero": 1},),
        ({"parallelism.tensor": 2},),
        ({"parallelism.context": 2},),
        ({"parallelism.expert": 2},),
        ({"memory.recompute": "selective"},),
    ]
    yield from (plan for plan in plans if plan[0].keys() <= set(searched))


def with_settings(job: JobSpec, settings: Settings) -> JobSpec:
    """Returns a job with these values, and defaults of the other fields that it leaves to the compiler."""
    return with_values(without_auto(job), settings)


def settings_line(settings: Settings) -> str:
    """Returns settings in words: `zero = 3, microbatches = 4`."""
    return ", ".join(f"{path.partition('.')[2]} = {value_text(value)}" for path, value in settings.items())
