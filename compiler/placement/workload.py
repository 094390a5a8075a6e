"""The size of the work: samples, batches, shares and steps, from the job and the facts of its data.

Sizes that depend on unknown data are None. The rules on them are here too, because a batch that cannot be divided has
no sizes: E03xx.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.steps import StreamStep
from dslc.compiler.placement.epochs import Epoch, are_comparable, check_batch, counts, share_weights
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import compares
from dslc.compiler.placement.sharding import low_precision
from dslc.compiler.placement.shares import deal, largest
from dslc.compiler.placement.streams import stream_of
from dslc.dsl.diagnostics import Diagnostic, Findings, judge, passes
from dslc.dsl.language import calls as c
from dslc.dsl.language.blocks import Balanced, Weighted
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import Quantity
from dslc.dsl.record import Record, record
from dslc.dsl.remedy import remedy, remove_field
from dslc.dsl.words import plural

NO_TARGET = -100  # of tokens that a loss of pairs does not count
MOST_EQUAL_SHARES = 2  # that a rank may take when shares are measured: memory is planned for as many
Counts = Literal["samples", "tokens", "kept", "own"]  # see `LossStep`
# Sources whose targets are known to be classes from 0 up.
_CLASSES_FROM_0 = c.Digits | c.Stdlib | c.Text | c.Tokens | c.Images | c.MNIST | c.CIFAR10 | c.Synthetic


@record
class PartLoad(Record):
    """The samples of one source of a mixture."""

    train: int | None
    validation: int | None
    test: int | None
    split: str
    visited: int | None = None  # in an epoch


@record
class Workload(Record):
    """Counts are of samples (sequences, for text) unless noted."""

    train: int | None
    visited: int | None  # in an epoch: as many as `train`, but with a sampler that draws
    validation: int | None
    test: int | None
    split: str  # random, tail, given, none; each: of a mixture
    mixed: tuple[PartLoad, ...] = ()
    batch: int
    share: int  # of one data rank: the largest
    shares: tuple[int, ...] = ()  # of each data rank, if they are not equal
    weights: tuple[int, ...] = ()  # to which `shares` are in proportion
    measured: bool = False  # the run measures its shares: `shares` are equal, and `share` the largest that it may take
    microbatch: int  # the largest micro-batch
    last: int | None  # samples of an epoch's last, partial batch if it is kept; 0 if there is none
    steps_per_epoch: int | None
    steps: int | None
    counts: Counts  # the count that divides the losses of a step
    target: int = 0  # bytes of a sample's target
    sets: tuple[tuple[str, int], ...] = ()  # name and samples of validation sets that have names
    stream: StreamStep | None = None  # without a length, all steps are one epoch

    @property
    def endless(self) -> bool:
        """True for a stream without a length: the sizes of an epoch are the sizes of the whole training."""
        return self.stream is not None and not self.stream.length

    @property
    def smallest_share(self) -> int:
        """The fewest samples of a data rank in a full batch, as planned. A rank may measure a smaller share."""
        return min(self.shares, default=self.share)

    @property
    def expected_share(self) -> float:
        """The samples of the rank that a step waits for: the mean, where shares follow the speeds of the ranks."""
        return self.batch / len(self.shares) if self.measured else self.share

    def in_rows(self, rows: int) -> Workload:
        """Returns the work of a rank in rows of a batch; a sample may take several."""
        if rows == 1:
            return self
        shares = tuple(rows * share for share in self.shares)
        return replace(
            self, batch=rows * self.batch, share=rows * self.share, shares=shares, microbatch=rows * self.microbatch
        )

    @property
    def last_trained(self) -> int | None:
        """`last`, but 0 if the training ends before the first such batch."""
        ends = self.steps is not None and self.visited is not None and self.steps <= self.visited // self.batch
        return 0 if ends else self.last


def measure_out(job: JobSpec, layout: Layout, source: SourceFacts) -> Findings[Workload | None]:
    """Returns the workload; None if it yields an error."""
    data, ranks = job.data, layout.sizes["data"]
    (mixed, stream, (train, validation, test), split), known = yield from judge(_sizes(job, source, ranks))
    visited = _sum(mixed, "visited") if mixed else _visited(job, train)
    epoch = Epoch(
        train=visited if known else None,
        ranks=ranks,
        pieces=layout.microbatches,
        staged=layout.sizes["pipeline"] > 1,
        keep=data.last_batch == "keep",
        steps=job.train.steps,
    )
    fits = yield from passes(check_batch(job, layout, epoch))
    if not known or not fits:
        return None
    last_batch: int | None = None if epoch.keep else 0
    per_epoch: int | None = None
    if visited is not None:
        full, rest = divmod(visited, data.batch)
        last_batch = rest if epoch.keep else 0
        per_epoch = full + (1 if last_batch else 0)
    steps = job.train.steps
    if steps is None and job.train.epochs is not None and per_epoch is not None:
        steps = job.train.epochs * per_epoch
    weights = share_weights(job.parallelism, ranks)
    shares = deal(data.batch, weights, layout.microbatches) if weights else ()
    share = max(shares, default=data.batch // ranks)
    measured = job.parallelism.data_shares == "measured" and ranks > 1
    if measured:
        share = min(MOST_EQUAL_SHARES * share, data.batch - (ranks - 1) * layout.microbatches)
    return Workload(
        train=train,
        visited=visited,
        validation=validation,
        test=test,
        split=split,
        mixed=mixed,
        batch=data.batch,
        share=share,
        shares=shares,
        weights=weights,
        measured=measured,
        microbatch=largest(share, layout.microbatches),
        last=last_batch,
        steps_per_epoch=per_epoch,
        steps=steps,
        counts=loss_divisor(job, source),
        target=_target_bytes(source),
        sets=source.found.get("validation_sets", ()),
        stream=stream,
    )


def _sizes(
    job: JobSpec, source: SourceFacts, ranks: int
) -> Findings[tuple[tuple[PartLoad, ...], StreamStep | None, Sizes, str]]:
    """Returns the parts of a mixture, the order of a stream, the sizes of the splits, and the kind of split."""
    yield from _missing(job, source)
    mixed = yield from _parts(job, source)
    stream = yield from stream_of(job, source, ranks)
    if isinstance(job.data.source, c.Mixture):
        return mixed, stream, (_sum(mixed, "train"), _sum(mixed, "validation"), _sum(mixed, "test")), "each"
    if source.shards is not None:
        return mixed, stream, *_split_of_stream(job, source, stream)
    sizes, split = yield from _split(job, source, _shares(job))
    return mixed, stream, sizes, split


def _target_bytes(source: SourceFacts) -> int:
    if source.structures is not None:
        return source.structures[1].bytes
    return source.target.bytes if source.target is not None else 0


def _sum(parts: tuple[PartLoad, ...], name: str) -> int | None:
    counts_of_parts = [getattr(part, name) for part in parts]
    return None if None in counts_of_parts else sum(counts_of_parts)


def _parts(job: JobSpec, source: SourceFacts) -> Findings[tuple[PartLoad, ...]]:
    """Returns the work of each source of a mixture. One with its own validation set holds nothing else out."""
    mixture, none = job.data.source, {"validation": 0.0, "test": 0.0}
    if not isinstance(mixture, c.Mixture):
        return ()
    has_validation = [facts.validation_samples is not None for facts in source.parts]
    loads = []
    for n, (facts, has_own) in enumerate(zip(source.parts, has_validation, strict=True)):
        # E0306 once, if it is out of place.
        shares = _shares(job) if not has_own or (all(has_validation) and n == 0) else none
        (train, validation, test), split = yield from _split(job, facts, shares)
        loads.append(PartLoad(train=train, validation=validation, test=test, split=split))
    sizes = [part.train for part in loads if part.train]
    weights = mixture.weights or sizes
    if len(sizes) < len(loads) or len(weights) != len(sizes) or not are_comparable(weights):
        return tuple(loads)
    visited = counts(mixture, sizes)
    return tuple(replace(part, visited=count) for part, count in zip(loads, visited, strict=True))


def _visited(job: JobSpec, train: int | None) -> int | None:
    """Returns the samples of an epoch."""
    sampler = job.data.sampler
    return sampler.samples if isinstance(sampler, Weighted | Balanced) and sampler.samples is not None else train


def ignored(job: JobSpec, source: SourceFacts) -> int | None:
    """Returns the target that does not count; None if all do."""
    match job.model.loss:
        case c.CrossEntropy(ignore=target):
            return target
        case PreferenceLoss():
            return NO_TARGET
        case c.PythonLoss(ignore=target, over=None):
            takes_all = source.structures is not None or (source.target is not None and source.target.dtype == "int64")
            return target if takes_all else None
        case _:
            return None


def document_end(job: JobSpec, source: SourceFacts) -> int | None:
    """Returns the token that ends a document where sequences hold several; None if they do not."""
    if isinstance(job.data.source, c.Chat) and job.data.source.pack is not None:
        return int(source.found.get("filler", 0))
    return job.data.documents


def masks_documents(job: JobSpec, layout: Layout, model: ModelGraph) -> bool:
    """Returns whether attention within documents takes a mask of all pairs of positions (runtime/model/documents.py):
    on a GPU in 32 bits, over a context axis, with a window that is shorter than the sequence, and with dropout of its
    scores.
    """
    if not job.data.has_documents:
        return False
    if layout.sizes["context"] > 1 or (layout.device == "cuda" and not low_precision(job)):
        return True
    if model.traced is not None:
        return model.traced.documents_masked
    windows = (module.arguments.get("window") for module in model.root.walk()) if model.root is not None else ()
    return any(window is not None and window < model.input.shape[0] for window in windows)


def loss_divisor(job: JobSpec, source: SourceFacts) -> Counts:
    """Returns the count that divides the losses of a step.

    The ranks must sum in each step how many targets are kept, unless all are classes from 0 up and none of these is
    ignored: then their count is arithmetic.
    """
    if compares(job.model.loss) or isinstance(job.model.loss, PreferenceLoss):
        return "samples"
    library = not isinstance(job.model.loss, c.NetworkLoss | c.PythonLoss)
    if source.loss_counts or (not library and (isinstance(job.model.loss, c.NetworkLoss) or source.structures)):
        return "own"
    if source.structures:
        return "samples" if ignored(job, source) is None else "kept"
    ignore = ignored(job, source)
    if ignore is None:
        return "samples"
    if job.data.has_documents:
        return "kept"
    if not all(isinstance(each, _CLASSES_FROM_0) for each in c.parts_of(job.data.source)) or ignore >= 0:
        return "kept"
    return "tokens" if source.target is not None and source.target.shape else "samples"


def in_steps(interval: Quantity, workload: Workload) -> int | None:
    """Returns `500 steps` or `2 epochs` as a count of steps, at least one; None if an epoch's length is unknown."""
    if interval.dimension == "steps":
        return max(1, int(interval.value))
    if interval.dimension == "epochs" and workload.steps_per_epoch is not None:
        return max(1, round(interval.value * workload.steps_per_epoch))
    return None


def steps_of(time: Quantity, workload: Workload) -> int | None:
    """Returns a time of the training in steps, rounded to the nearest; None if it depends on an unknown."""
    if time.dimension == "ratio":
        return None if workload.steps is None else round(time.value * workload.steps)
    if time.value == 0:
        return 0
    return in_steps(time, workload)


def _missing(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    if source.missing:
        elsewhere = source.code in ("E0309", "E0803")  # another machine may have it
        call = job.data.source
        span = call.value_span(source.argument) if source.argument else job.data.value_span("source")
        fault = Diagnostic(code=source.code, message=source.missing, span=span, help=source.help)
        yield fault.as_warning() if elsewhere else fault


Sizes = tuple[int | None, int | None, int | None]  # to train on, held out, for the test


def _shares(job: JobSpec) -> dict[str, float]:
    return {"validation": job.data.validation, "test": job.data.test}


def _split(job: JobSpec, source: SourceFacts, shares: Mapping[str, float]) -> Findings[tuple[Sizes, str]]:
    if source.validation_samples is not None:
        for field, ratio in shares.items():
            if ratio:
                yield Diagnostic(
                    "E0306",
                    f"the source brings a validation set of its own, and `data.{field}` would hold out another part",
                    job.data.value_span(field),
                    help=remedy(remove_field(f"data.{field}"))
                    if field == "validation"
                    or source.test_samples is not None
                    or not isinstance(job.data.source, c.PythonSource)
                    else "let the source give a triple (train, validation, test)",
                )
        return (source.samples, source.validation_samples, source.test_samples or 0), "given"
    if not any(shares.values()):
        # A source that is not known yet may bring splits of its own.
        none = None if source.samples is None else 0
        return (source.samples, none, none), "none"
    split = "tail" if source.stream else "random"
    if source.samples is None:
        return (None, None if shares["validation"] else 0, None if shares["test"] else 0), split
    held_out = {field: int(source.samples * ratio + 0.5) for field, ratio in shares.items()}
    remaining = source.samples - sum(held_out.values())
    for field, ratio in shares.items():
        if ratio and (held_out[field] == 0 or remaining <= 0):
            why = "nothing is held out" if held_out[field] == 0 else "nothing is left to train on"
            both = held_out[field] > 0 and all(shares.values())
            yield Diagnostic(
                "E0305",
                f"{'both shares' if both else format(ratio, '.4g')} of {plural(source.samples, 'sample')}: {why}",
                job.data.value_span(field),
                label=f"{source.samples} x {sum(shares.values()) if both else ratio:.4g} = "
                f"{source.samples * (sum(shares.values()) if both else ratio):.3g}",
                help=_shares_between(source.samples) if not both else "smaller shares, or more data",
            )
            break
    return (remaining, held_out["validation"], held_out["test"]), split


def _split_of_stream(job: JobSpec, source: SourceFacts, stream: StreamStep | None) -> tuple[Sizes, str]:
    """Returns the same for a stream: without a length it has the samples of all steps."""
    steps = job.train.steps
    train = stream.length if stream and stream.length else steps * job.data.batch if steps else None
    held_out = source.validation_samples
    return (train, held_out or 0, source.test_samples or 0), "none" if held_out is None else "given"


def _shares_between(samples: int) -> str:
    """Names the fractions that hold out at least one sample and leave one."""
    if samples < 2:
        return "more data"
    digits = len(str(samples)) + 1  # so many that neither is rounded to nothing, or to all
    return f"a share between {1 / samples:.{digits}f} and {1 - 1 / samples:.{digits}f}, or more data"
