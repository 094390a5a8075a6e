"""The plans that `dslc calibrate` measures: the job's own, and for a job with `auto` one more of each kind."""

from __future__ import annotations

from collections.abc import Iterator

from dslc.dsl.language.auto_fields import auto_fields, with_values, without_auto
from dslc.dsl.language.job import JobSpec

# Values with times of their own: engines that take more for a step, axes and recomputation that make other layers.
KINDS: tuple[tuple[str, object], ...] = (
    ("parallelism.zero", 3),
    ("parallelism.pipeline", 2),
    ("parallelism.tensor", 2),
    ("parallelism.context", 2),
    ("memory.recompute", "selective"),
)


def plans_to_measure(job: JobSpec) -> Iterator[tuple[str, JobSpec]]:
    """Yields plans of a job, each with the setting that makes it, none for the first: the job with the defaults of the
    fields that it leaves to the compiler. Rules may refuse the others.
    """
    plain, left = without_auto(job), auto_fields(job)
    yield "", plain
    for path, value in KINDS:
        if path in left:
            yield f"{path} = {value}", with_values(plain, {path: value})
