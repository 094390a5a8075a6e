"""The order of the samples, where that is not a permutation of them."""

from __future__ import annotations

from dslc.dsl.language.calls import PythonCall
from dslc.dsl.language.registry import Bool, Call, Int, Path, arg, call, calls, either

_COUNT = Int(min=1)
_SAMPLES = "how many an epoch has"
_SHOWN = "as many as the data has"


@call("numbers", "python", open=True)
class PythonNumbers(PythonCall):
    """`f()` of yours, which gives one number for each sample; for `by_length` `f(sample)`, which gives its length."""


@call("sampler")
class Weighted(Call):
    """Samples are drawn by weights, as torch's `WeightedRandomSampler` draws them. Of a data set that brings no
    validation set of its own there is a weight for each sample, held out or not.
    """

    weights: str | PythonNumbers = arg(
        either(Path("read"), calls("numbers")),
        'a weight for each sample: a `.npy` file, or `python("module:function")`; they need not sum to 1',
    )
    samples: int | None = arg(_COUNT, _SAMPLES, default=None, shown=_SHOWN)
    replacement: bool = arg(Bool(), "a sample may be drawn again in the same epoch", default=True)


@call("sampler")
class Balanced(Call):
    """Each class is drawn as often, by weights that are one over the number of its samples, with replacement. It reads
    each target once, before the first step.
    """

    samples: int | None = arg(_COUNT, _SAMPLES, default=None, shown=_SHOWN)


@call("sampler")
class ByLength(Call):
    """Samples of like length share a batch, so that less of it is padding: each is seen once an epoch, and what
    `window` batches hold is sorted by length.
    """

    length: str | PythonNumbers | None = arg(
        either(Path("read"), calls("numbers")),
        'the length of a sample: `python("module:function")` of one sample, or a `.npy` file of all lengths',
        default=None,
        shown="the first dim of its first tensor",
    )
    window: int = arg(_COUNT, "how many batches are sorted together: more of them are more alike", default=50)
