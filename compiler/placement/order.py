"""The order of the samples of an epoch, in words."""

from __future__ import annotations

from dslc.dsl.language.calls import Mixture
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.samplers import Balanced, ByLength, Weighted
from dslc.dsl.words import plural


def order_text(job: JobSpec) -> str:
    """Returns `shuffled each epoch` and the like, to follow the number of samples."""
    if isinstance(job.data.source, Mixture):
        together = "shuffled together" if job.data.shuffle else "in turn"
        return f"{plural(len(job.data.source.sources), 'source')} {together}"
    match job.data.sampler:
        case Weighted(samples=samples, replacement=replacement):
            again = "with" if replacement else "without"
            return f"{_drawn(samples)} each epoch by weight, {again} replacement"
        case Balanced(samples=samples):
            return f"{_drawn(samples)} each epoch, each class as often"
        case ByLength(window=window):
            return f"shuffled each epoch, {plural(window, 'batch')} at a time sorted by length"
        case _:
            return "shuffled each epoch" if job.data.shuffle else "in order"


def _drawn(samples: int | None) -> str:
    return "as many drawn" if samples is None else f"{samples:,} drawn"
