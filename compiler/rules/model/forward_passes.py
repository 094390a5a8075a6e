"""Rules for what a network's forward pass draws, mixes, moves and keeps, as tracing and a trial show it.

W0437, W0608, W0625, W0641 to W0649, E0641, E0643, E0644, E0680, E0681, W0685. The ranks, the micro-batches and the
batches of an evaluation each have a part of what one process takes at once: a forward pass that depends on the whole
computes something else there.
"""

from __future__ import annotations

from collections.abc import Iterator

from dslc.compiler.ir.network_facts import GENERATOR, UNSEEDED, CodePlace, NetworkFacts
from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.placement.draws import draws_by_sample, torch_draws_because, uncontrolled_draw
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import recomputed, sharding_of
from dslc.compiler.placement.workload import Workload
from dslc.compiler.rules.parallelism.sharding import or_else, sharding_span
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import remedy, set_field


def check_forward_passes(
    job: JobSpec, layout: Layout, workload: Workload | None, model: ModelGraph
) -> Iterator[Diagnostic]:
    ranks, chunks = layout.sizes["data"], layout.sizes["data"] * layout.microbatches
    facts = model.traced.network if model.traced is not None else None
    yield from _warn_of_noise(job, layout, model, facts)
    yield from _warn_of_buffers(job, layout, model, facts)
    if facts is None:
        return
    if facts.cpu_tensor is not None:
        yield Diagnostic(
            "E0681",
            "the forward pass computes with a tensor on the CPU beside those on the GPU "
            f"({place_text(facts.cpu_tensor)})",
            job.model.network_span,
            help="make it where the input is, as in `torch.arange(n, device=x.device)`; what the network keeps belongs "
            "in `register_buffer`",
        )
    if facts.failure:
        yield Diagnostic(
            "W0648",
            f"the network was tried on samples of the data, and failed: {facts.failure}",
            job.model.network_span,
            help="a network that needs a GPU cannot be tried here; any other fails in the training, too",
        )
    if facts.host_draws is not None and chunks > 1:
        yield from _warn_of_host_draws(job, layout, facts)
    yield from _check_skipped_norms(job, ranks, facts)
    yield from _check_written(job, layout, facts)
    yield from _warn_of_mixed_samples(job, chunks, facts)
    yield from _check_recomputed(job, model, facts)
    yield from _check_untracked(job, ranks, workload, facts)
    if facts.loss_mixes and chunks > 1:
        yield Diagnostic(
            "W0625",
            f"the loss that the network returns is no mean of losses of single samples, and a batch is cut into "
            f"{chunks} pieces: the training is not that of one process",
            job.model.value_span("loss"),
            notes=(Note("the network", job.model.network_span),),
            help='return the outputs, and compare them in `loss = python("module:function", over = all)`; for a mean '
            "over a part of a batch, `own(mean_of = …)` or a pair (sum, count)",
        )
    yield from _warn_of_state(job, ranks, facts)


def _warn_of_mixed_samples(job: JobSpec, chunks: int, facts: NetworkFacts) -> Iterator[Diagnostic]:
    """Warns of outputs that depend on the other samples of a batch, or on random numbers in evaluation mode."""
    if facts.mixes is not None and chunks > 1:
        yield Diagnostic(
            "W0642",
            f"the network's output for a sample depends on the other samples of its batch "
            f"({place_text(facts.mixes)}), and a batch is cut into {chunks} pieces: the training is "
            "not that of one process",
            job.model.network_span,
            help="of a norm: torch's `BatchNorm` is synchronised over the ranks, and `LayerNorm` has statistics of "
            "each sample; what mixes samples on purpose, such as mixup, needs one rank and one micro-batch",
        )
    if facts.mixes_evaluation is not None:
        yield Diagnostic(
            "W0643",
            f"in evaluation mode the output for a sample depends on the other samples of its batch "
            f"({place_text(facts.mixes_evaluation)}): evaluations and `predict` depend on how samples are put "
            "together, which differs with the number of ranks and micro-batches",
            job.model.network_span,
            help="use `self.training` to compare samples in training only, and kept statistics in evaluation",
        )
    if facts.evaluation_draw is not None:
        yield Diagnostic(
            "W0649",
            f"the network draws random numbers in evaluation mode, too ({place_text(facts.evaluation_draw)}): "
            "evaluations and `predict` do not repeat themselves, and each rank draws others",
            job.model.network_span,
            help="`F.dropout(x, training = self.training)` and `nn.Dropout` draw in training only",
        )


def place_text(place: CodePlace) -> str:
    """Returns a place in words, as in "`blocks.0` (Block), nets.py:31"."""
    module = f"`{place.module}` ({place.kind})" if place.module else f"`{place.kind}`"
    return f"{module}, {place.line}" if place.line else module


def _remainder_text(count: int) -> str:
    return f"and {count} more" if count else ""


def _warn_of_noise(job: JobSpec, layout: Layout, model: ModelGraph, facts: NetworkFacts | None) -> Iterator[Diagnostic]:
    if not model.noise or (layout.world_size == 1 and layout.microbatches == 1) or draws_by_sample(job, layout, model):
        return
    where = "on each rank" if layout.world_size > 1 else "for each micro-batch than for a whole batch"
    reason = torch_draws_because(job, layout, model)
    place = facts.torch_draws if facts is not None else None
    uncontrolled = uncontrolled_draw(layout, model) if not reason else None
    if uncontrolled is not None:
        place, reason = uncontrolled
    source = f" ({place_text(place)})" if place is not None else ""
    draws = f"dropout{source} draws different numbers"
    if place is not None and "Dropout" not in place.kind:
        draws = f"the network{source} draws random numbers, different ones"
    yield Diagnostic(
        "W0608",
        f"{draws} {where}: training agrees with one process in distribution only",
        job.model.value_span("network"),
        label=reason,
        help=remedy(set_field("train.dropout_generator", "counter")) if job.train.dropout_generator == "torch" else "",
    )


def _warn_of_host_draws(job: JobSpec, layout: Layout, facts: NetworkFacts) -> Iterator[Diagnostic]:
    assert facts.host_draws is not None
    ranks = layout.sizes["data"]
    pieces = f"{ranks} ranks" if ranks > 1 else f"{layout.microbatches} micro-batches"
    place = place_text(facts.host_draws)
    if facts.draws_from != UNSEEDED:
        cause = f"the forward pass draws from {facts.draws_from} ({place}), each of {pieces} for itself"
    else:
        cause = (
            f"two passes over the same samples differ ({place}) though all random generators are seeded alike: the "
            f"forward pass depends on {UNSEEDED}, which differs between {pieces}"
        )
    yield Diagnostic(
        "W0641",
        f"{cause}: training agrees with one process in distribution only",
        job.model.network_span,
        help=(
            "leave it if each may draw for itself"
            if facts.repeats
            else "draw from `random`, `numpy.random` or `torch`, which are seeded, so that a training repeats itself"
        )
        + "; for the numbers of one process take the path without a draw, or one rank and one micro-batch",
    )


def _check_skipped_norms(job: JobSpec, ranks: int, facts: NetworkFacts) -> Iterator[Diagnostic]:
    """Reports a batch norm that one rank would run, and wait there for ranks that skip it."""
    if not facts.skipped_norms or ranks == 1:
        return
    name, more = facts.skipped_norms[0], len(facts.skipped_norms) - 1
    place = facts.host_draws or facts.torch_draws
    by = facts.draws_from if facts.host_draws is not None else "numbers that the forward pass reads out of tensors"
    where = f" ({place_text(place)})" if place is not None else ""
    yield Diagnostic(
        "E0644",
        f"some passes run the batch norm `{name}` and others skip it, by {by}{where}"
        f": its statistics are those of {ranks} ranks, which would wait for each other",
        job.model.network_span,
        label=_remainder_text(more),
        help="choose the path alike on each rank, by a generator that is seeded the same on all of them; or normalise "
        "each sample (`GroupNorm`, `LayerNorm`); or one rank of the data axis",
    )


def _warn_of_buffers(
    job: JobSpec, layout: Layout, model: ModelGraph, facts: NetworkFacts | None
) -> Iterator[Diagnostic]:
    ranks, microbatches = layout.sizes["data"], layout.microbatches
    changed = model.traced.changed if model.traced is not None else ()
    if facts is not None and facts.tried:
        moved = [name for name in changed if name not in facts.counted]
        changed = changed if microbatches > 1 else tuple(moved)
    if not changed or ranks * microbatches == 1:
        return
    first, more = changed[0], len(changed) - 1
    by_samples = facts is not None and first in facts.moved
    if microbatches > 1:
        what = (
            f"the forward pass changes the buffer `{first}` {microbatches} times in a step, once for each micro-batch: "
            "if anything depends on it, training differs from that with a whole batch"
        )
    else:
        what = (
            f"the forward pass changes the buffer `{first}` {'by' if by_samples else 'perhaps by'} the samples that it "
            f"is given, a share of {ranks} of a batch: all ranks take that of the first one, and what depends on it "
            "differs from one process"
        )
    yield Diagnostic(
        "W0437",
        what,
        job.parallelism.value_span("microbatches") if microbatches > 1 else job.model.network_span,
        label=f"and {more} more such buffers" if more > 1 else "and one more such buffer" if more else "",
        notes=(Note("the network", job.model.value_span("network")),) if microbatches > 1 else (),
        help=remedy(set_field("parallelism.microbatches", 1), ", or a buffer that forward passes leave as it is")
        if microbatches > 1
        else "one rank; or a parameter that trains, or torch's `BatchNorm`, whose statistics are over all ranks",
    )


def _check_written(job: JobSpec, layout: Layout, facts: NetworkFacts) -> Iterator[Diagnostic]:
    """Reports parameters that a forward pass writes, where no rank or not each one would keep the same numbers."""
    if not facts.written:
        return
    name, label, ranks = facts.written[0], _remainder_text(len(facts.written) - 1), layout.sizes["data"]
    note = Note("the network", job.model.network_span)
    if sharding_of(job, layout).engine == "fsdp":
        yield Diagnostic(
            "E0680",
            f"the forward pass writes the parameter `{name}`, of which each rank keeps some rows: what it writes into "
            "the gathered copy is lost when the copy is freed",
            sharding_span(job, layout),
            label=label,
            notes=(note,),
            help=remedy(
                "a buffer, which each rank keeps whole: `register_buffer`",
                or_else(job, layout, "none", "ddp", "zero1"),
            ),
        )
    elif facts.written_by_samples and ranks > 1:
        yield Diagnostic(
            "E0680",
            f"the forward pass moves the parameter `{facts.written_by_samples[0]}` by the samples that it is given, a "
            f"share of {ranks} of a batch: each rank would have another",
            job.model.network_span,
            label=_remainder_text(len(facts.written_by_samples) - 1),
            help="a buffer, of which all ranks take that of the first one: `register_buffer`; or one rank of the data "
            "axis",
        )
    elif layout.microbatches > 1:
        yield Diagnostic(
            "W0685",
            f"the forward pass moves the parameter `{name}` {layout.microbatches} times in a step, once for each "
            "micro-batch: training differs from that with a whole batch",
            job.parallelism.value_span("microbatches"),
            label=label,
            notes=(note,),
            help=remedy(set_field("parallelism.microbatches", 1)),
        )


def _check_recomputed(job: JobSpec, model: ModelGraph, facts: NetworkFacts) -> Iterator[Diagnostic]:
    """Reports a recomputed block whose second pass would take another path than its first."""
    places = [facts.host_draws.module] if facts.host_draws is not None and not facts.draws_globally else []
    if facts.paths_differ:
        places += [attribute.name.rpartition(".")[0] for attribute in facts.attributes]
    for block in recomputed(job, model):
        if any(place == block or place.startswith(f"{block}.") for place in places):
            state = facts.draws_from or f"`{facts.attributes[0].name}`, which each pass changes"
            yield Diagnostic(
                "E0641",
                f"the block `{block}` takes its path by {state}, and recomputation runs it a second time, where it "
                "would take another",
                job.memory.value_span("recompute"),
                notes=(Note("the network", job.model.network_span),),
                help=remedy(
                    "draw from `random`, `numpy.random` or `torch`, which draw the same in both passes; or ",
                    set_field("memory.recompute", "none"),
                ),
            )
            return


def _check_untracked(job: JobSpec, ranks: int, workload: Workload | None, facts: NetworkFacts) -> Iterator[Diagnostic]:
    if not facts.untracked:
        return
    name, more = facts.untracked[0], len(facts.untracked) - 1
    held_out = workload is not None and ((workload.validation or 0) + (workload.test or 0)) > 0
    if held_out and ranks > 1:
        yield Diagnostic(
            "E0643",
            f"the batch norm `{name}` keeps no running statistics, so an evaluation takes those of its batches, which "
            f"differ on {ranks} ranks from those in one process",
            job.model.network_span,
            label=_remainder_text(more),
            notes=(
                Note("the samples of evaluations", job.data.value_span("validation") or job.data.value_span("source")),
            ),
            help="`track_running_stats = True`; or one rank of the data axis; or no validation and test samples",
        )
    elif facts.mixes_evaluation is None:
        yield Diagnostic(
            "W0643",
            f"the batch norm `{name}` keeps no running statistics: evaluations and `predict` depend on how samples are "
            "put together, which differs with the number of ranks and micro-batches",
            job.model.network_span,
            label=_remainder_text(more),
            help="`track_running_stats = True`",
        )


def _warn_of_state(job: JobSpec, ranks: int, facts: NetworkFacts) -> Iterator[Diagnostic]:
    """Warns of state of a network that a checkpoint does not keep, and of a mode that training undoes."""
    if facts.attributes:
        first, more = facts.attributes[0], len(facts.attributes) - 1
        line = f" ({first.line})" if first.line else ""
        over = f", and each of {ranks} ranks has its own" if ranks > 1 else ""
        draws = first.holds == GENERATOR
        what = f"moves the generator `{first.name}`" if draws else f"writes {first.holds} to `{first.name}`{line}"
        yield Diagnostic(
            "W0646",
            f"`forward` {what}, on which later passes depend and which no checkpoint keeps: a resumed training begins "
            f"without it{over}",
            job.model.network_span,
            label=_remainder_text(more),
            help="draw from `random`, `numpy.random` or `torch`, whose states checkpoints keep"
            if draws
            else "`register_buffer` keeps a tensor in checkpoints; or begin each batch anew",
        )
    if facts.restored:
        name, more = facts.restored[0], len(facts.restored) - 1
        yield Diagnostic(
            "W0647",
            f"the network puts `{name}` into evaluation mode when it is made, and training puts it into training mode "
            "again, as `model.train()` does",
            job.model.network_span,
            label=_remainder_text(more),
            help="override `train`, so that it calls `super().train(mode)` and then `eval()` of these modules",
        )
