"""The order of the samples of an epoch, in words."""

from __future__ import annotations

from dslc.compiler.ir.program import SamplerStep
from dslc.dsl.words import plural


def order_text(sources: int, sampler: SamplerStep | None, samples: int | None, *, shuffle: bool) -> str:
    """Returns `shuffled each epoch` and the like, to follow the number of `samples`; `sources` counts the sources of a
    mixture, 0 without one.
    """
    if sources:
        return f"{plural(sources, 'source')} {'shuffled together' if shuffle else 'in turn'}"
    if sampler is None:
        return "shuffled each epoch" if shuffle else "in order"
    drawn = "as many drawn" if sampler.samples in (samples, 0) else f"{sampler.samples:,} drawn"
    match sampler.kind:
        case "weighted":
            return f"{drawn} each epoch by weight, {'with' if sampler.replacement else 'without'} replacement"
        case "balanced":
            return f"{drawn} each epoch, each class as often"
        case "by_length":
            return f"shuffled each epoch, {plural(sampler.window, 'batch')} at a time sorted by length"
