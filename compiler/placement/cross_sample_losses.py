"""Losses that compare the samples of a batch: over which ranks, and in how many passes.

Model: such a loss is over the samples of all data ranks, or of the data ranks of a node. With several micro-batches
each step begins with a forward pass of all of them without autograd, which makes their outputs ahead. The loss of these
gives the gradient of each output, and the passes of each micro-batch use these gradients (GradCache: Gao et al. 2021,
arXiv:2101.06983).

Limits: on several nodes `over = node` takes for granted that the ranks of a tensor axis are on one of them.
"""

from __future__ import annotations

from dslc.compiler.placement.layout import Layout
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.registry import Call


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


def makes_outputs_ahead(job: JobSpec, layout: Layout) -> bool:
    """True if a step makes the outputs of all micro-batches first, and each of them again."""
    return compares(job.model.loss) and layout.microbatches > 1
