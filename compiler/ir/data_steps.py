"""The steps of a rank's data: its samples, their order, and the changes to images."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from dslc.compiler.ir.steps import Arguments, PythonFunction, StreamStep
from dslc.dsl.record import Record, record


@record
class SamplerStep(Record):
    """An order of samples that follows from a number of each: its weight (`weighted`), its class (`balanced`), or its
    length (`by_length`). The numbers are in the `.npy` file `file`, or `python` gives them; else they are taken from
    the samples.
    """

    kind: Literal["weighted", "balanced", "by_length"]
    samples: int  # that an epoch visits
    replacement: bool = True
    window: int = 0  # of `by_length`: how many batches are sorted together
    file: str = ""
    python: PythonFunction | None = None
    line: str = ""

    @property
    def text(self) -> str:
        """Returns what a training that resumes must have alike."""
        match self.kind:
            case "weighted":
                return f"weighted(samples = {self.samples}, replacement = {str(self.replacement).lower()})"
            case "balanced":
                return f"balanced(samples = {self.samples})"
            case "by_length":
                return f"by_length(window = {self.window})"


@record
class AugmentStep(Record):
    """A class of `torchvision.transforms.v2`, and its arguments."""

    kind: str
    arguments: Arguments = field(default_factory=dict)


@record
class PictureStep(Record):
    """The transforms of pictures. For training: `fit` (size, shorter side before), then `augment` or `transform`, a
    function of the user's; numbers 0 … 1; the normalisation; `erase`. Of evaluations, the normalisation alone is here.
    """

    shape: tuple[int, ...]  # channels, height, width
    fit: tuple[int, int] | None = None
    augment: tuple[AugmentStep, ...] = ()
    erase: tuple[AugmentStep, ...] = ()
    transform: PythonFunction | None = None
    mean: tuple[float, ...] = ()  # of each channel; none: numbers stay as they are
    std: tuple[float, ...] = ()


@record
class DataStep(Record):
    """The samples, and the way an epoch of them is split.

    Order: epoch `e` visits the `train_samples` in the order `permutation(seed, e)`, or as they are, or as the `sampler`
    says. A sampler may visit fewer or more of them: `visited`; global batch `k` of it is entries `k*batch` to
    `(k+1)*batch`; the last, of `last` samples, exists with `keep` alone. A data rank takes a contiguous share of each
    global batch, sizes differing by at most one, the larger first, or in proportion to `shares`; a share is cut into
    micro-batches whose sizes differ by at most one.
    """

    # digits, stdlib, text, tokens, chat, preferences, images, mnist, cifar10, arrays, parquet, datasets, synthetic,
    # python, mixture
    source: str
    arguments: Arguments = field(default_factory=dict)
    paths: tuple[str, ...] = ()  # the arguments that are paths, or several
    python: PythonFunction | None = None
    pictures: PictureStep | None = None  # what they go through beside their size
    structured: bool = False  # batches are structures of tensors, and each micro-batch is made by itself
    collate: PythonFunction | None = None  # makes samples a batch
    whole: bool = False  # the model is given whole batches, which are not pairs (input, target)
    train_samples: int
    validation_samples: int
    test_samples: int = 0
    # By the seed; the end of the stream; a pair of data sets; none; that of each source of a mixture.
    split: Literal["random", "tail", "given", "none", "each"]
    seed: int
    shuffle: bool
    sampler: SamplerStep | None = None
    parts: tuple[DataStep, ...] = ()  # the sources of a mixture, each with its own split
    counts: tuple[int, ...] = ()  # how many samples of each an epoch has
    batch: int
    last: int  # samples of the last, partial batch of an epoch; 0 if there is none or it is dropped
    shares: tuple[int, ...] = ()  # samples of each data rank in a full batch, if they are not equal
    most_share: int = 0  # the run measures `shares` when it begins, up to as many samples; 0: it takes them as they are
    pad: int | None = None  # the token that pads sequences; its targets become `ignore`
    documents: int | None = None  # the token that ends a document; its targets, of the next one, become `ignore`
    ignore: int = -100
    workers: int
    stream: StreamStep | None = None  # without a length, `train_samples` are those of all steps
    line: str = ""

    @property
    def validation_sets(self) -> tuple[tuple[str, int], ...]:
        """Name and samples of the sets that make up the validation split, one after another; () without names."""
        sets: tuple[tuple[str, int], ...] = self.arguments.get("validation_sets", ())
        return sets

    @property
    def visited(self) -> int:
        """The samples of an epoch, before its last batch is dropped."""
        if self.parts:
            return sum(self.counts)
        return self.train_samples if self.sampler is None else self.sampler.samples

    @property
    def order(self) -> str:
        """Returns what else than `shuffle` a training that resumes must have alike in its order; "" for nothing."""
        if self.parts:
            return f"mixture of {', '.join(map(str, self.counts))}"
        return "" if self.sampler is None else self.sampler.text
