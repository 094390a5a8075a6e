"""Losses of all samples of a batch: over which ranks, and in how many passes; and cross entropy in chunks.

Model: a loss that compares samples is over the samples of all data ranks, or of the data ranks of a node. With several
micro-batches each step begins with a forward pass of all of them without autograd, which makes their outputs ahead. The
loss of these gives the gradient of each output, and the passes of each micro-batch use these gradients (GradCache: Gao
et al. 2021, arXiv:2101.06983). A balance loss of experts needs the tokens of each expert in the global batch before the
first backward pass: with several micro-batches the same passes ahead count them.

Cross entropy with `chunks` is computed with the network's last dense layer, the head, some tokens at a time: the logits
of a chunk exist, and never a micro-batch's (runtime/technique/chunked_head.py). `auto` takes the fewest chunks
whose tokens are at most a quarter of the head's width, or `LEAST_TOKENS`. A chunk's logits are then a quarter of the
gradient of the head's weight, which exists anyway, and its products are large enough to be fast. Over the tensor axis
the head computes the losses also where one chunk is enough.

Limits: on several nodes `over = node` takes for granted that the ranks of a tensor axis are on one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, prod

from dslc.compiler.ir.nodes import LayerNode, ModelGraph
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.shares import largest
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import BalanceLoss, MixtureOfExperts
from dslc.dsl.language.preferences import PreferenceLoss
from dslc.dsl.language.registry import AUTO, Call
from dslc.dsl.record import Record, record

LEAST_TOKENS = 256  # of a chunk by `auto`: smaller products are slow


@record
class HeadChunks(Record):
    """The head and the loss of a micro-batch in chunks: `tokens` counts the largest micro-batch of a rank."""

    module: str
    chunks: int
    tokens: int

    @property
    def chunk_tokens(self) -> int:
        return largest(self.tokens, self.chunks)


def compares(loss: Call) -> bool:
    """True if the loss of a sample is defined by other samples too."""
    return isinstance(loss, c.Contrastive) or (isinstance(loss, c.PythonLoss) and loss.over is not None)


def compared_ranks(job: JobSpec, layout: Layout) -> int:
    """Returns the neighbours along the data axis whose samples a loss compares; 0 if it compares none."""
    loss = job.model.loss
    if not compares(loss):
        return 0
    ranks = layout.sizes["data"]
    if loss.over == "all" or layout.nodes == 1:  # type: ignore[attr-defined]
        return ranks
    return max(1, min(ranks, layout.processes // layout.stride("data")))


def has_forward_ahead(job: JobSpec, layout: Layout) -> bool:
    """True if a step runs the forward passes of all micro-batches first, and each of them again."""
    if layout.microbatches == 1 or layout.sizes["pipeline"] > 1:
        return False
    return compares(job.model.loss) or has_balance_loss(job)


def has_balance_loss(job: JobSpec) -> bool:
    """True if a loss balances some experts of the network."""
    return any(isinstance(mixture.balance, BalanceLoss) for mixture in mixtures(job))


def mixtures(job: JobSpec) -> Iterator[MixtureOfExperts]:
    yield from (call for call in calls_in(job.model.network) if isinstance(call, MixtureOfExperts))


def calls_in(value: object) -> Iterator[Call]:
    """Yields a call and those within it."""
    if isinstance(value, Call):
        yield value
        for name in value.record_names:
            yield from calls_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from calls_in(item)


def wants_chunks(job: JobSpec) -> bool:
    """True if the job asks for a loss in chunks."""
    loss = job.model.loss
    return isinstance(loss, c.CrossEntropy | PreferenceLoss) and loss.chunks != 1


def head_of(model: ModelGraph) -> LayerNode | None:
    """Returns the dense layer whose output is the model's; None if the model ends in something else."""
    last = model.layers[-1] if model.layers else None
    if model.traced is not None:
        head = model.layer_of(model.traced.head) if model.traced.head else None
        return head if head is not None and head.name == model.traced.head else None
    return last if last is not None and last.kind == "linear" else None


def chunked_head(job: JobSpec, layout: Layout, microbatch: int, model: ModelGraph) -> HeadChunks | None:
    """Returns the head of a loss in chunks; None for a loss of whole logits. `microbatch` are the most rows."""
    head = head_of(model) if wants_chunks(job) else None
    if head is None:
        return None
    assert isinstance(job.model.loss, c.CrossEntropy | PreferenceLoss)
    tokens = microbatch * prod(model.output.shape[:-1]) // layout.sizes["context"]
    chunks = job.model.loss.chunks
    if chunks == AUTO:
        chunks = ceil(tokens / max(LEAST_TOKENS, head.input.shape[-1] // 4))
    assert isinstance(chunks, int)
    chunks = max(1, min(chunks, tokens))
    if chunks == 1 and layout.sizes["tensor"] == 1:
        return None
    return HeadChunks(module=head.name, chunks=chunks, tokens=tokens)
