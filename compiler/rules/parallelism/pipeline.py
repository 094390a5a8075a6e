"""Rules of the pipeline axis. E0412 to E0414, E0430 to E0432, E0434, E0435, E0444, E0446, W0433, W0436, W0664."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslc.compiler.model.model import LayerNode, ModelGraph
from dslc.compiler.placement.epochs import fitting_pieces
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.schedules import SPLITS_BACKWARD, ScheduleTable, accepted_microbatches, demands
from dslc.compiler.placement.sharding import offloaded, sharding_of, trained
from dslc.compiler.placement.staging import holders, repeated_uses, unsendable
from dslc.dsl.bounds import ACTIONS, WORK
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.blocks import RecomputeBudget
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import either_field, remedy, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural, shorten_list


def check_pipeline(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports features that exclude stages of any kind."""
    parallelism = job.parallelism
    if layout.sizes["pipeline"] == 1:
        return
    if parallelism.schedule in SPLITS_BACKWARD:
        for code, why, span, help in _unsplit(job, layout):
            yield Diagnostic(
                code,
                f"`{parallelism.schedule}` splits the backward pass in two, {why}",
                span,
                notes=(Note("the schedule is set here", parallelism.value_span("schedule")),),
                help=remedy(help, ", or another schedule"),
            )
    if parallelism.zero == 2 and sharding_of(job, layout).shards > 1 and layout.microbatches > 1:
        yield Diagnostic(
            "W0433",
            "under a pipeline the gradients of a stage stay whole until its last micro-batch: `zero = 2` saves no "
            "more than `zero = 1`",
            parallelism.value_span("zero"),
            notes=(Note("the stages are asked for here", parallelism.value_span("pipeline")),),
        )


def warn_of_unknown_stages(job: JobSpec, layout: Layout, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Warns that a network which was not traced may not be cut as the job asks."""
    if layout.sizes["pipeline"] > 1 and model is None and job.model.has_user_network:
        yield Diagnostic(
            "W0436",
            f"the cut of the network into {layout.sizes['pipeline'] * layout.virtual_stages} stages is not checked",
            job.parallelism.value_span("pipeline"),
            notes=(Note("the network", job.model.value_span("network")),),
            help="`dslc check --trace` calls the function that makes it; `dslc run` always does",
        )


def _unsplit(job: JobSpec, layout: Layout) -> Iterator[tuple[str, str, Span | None, str]]:
    """Yields what excludes a split backward pass: the code, why, the place, and a change that helps."""
    if job.train.compile:
        yield (
            "E0414",
            "which compiled stages cannot do",
            job.train.value_span("compile"),
            remedy(set_field("train.compile", "false")),
        )
    if job.parallelism.zero == 3 and sharding_of(job, layout).reshard:
        why = "and between the halves `zero = 3` frees the parameters that the second needs"
        yield "E0430", why, job.parallelism.value_span("zero"), remedy(set_field("parallelism.zero", 2))
    if job.memory.recompute == "selective":
        why = "and torch recomputes what `selective` dropped only once"
        help = remedy(set_field("memory.recompute", "none"), ", which takes less memory here than `full`")
        yield "E0431", why, job.memory.value_span("recompute"), help
    if isinstance(job.memory.recompute, RecomputeBudget):
        why = "and recomputed blocks then hold more than they save"
        help = remedy(set_field("parallelism.schedule", "1f1b"), ", ", set_field("memory.recompute", "none"))
        yield "E0444", why, job.memory.value_span("recompute"), help


def has_piece_fault(model: ModelGraph) -> bool:
    """True if a user's own module cannot run on pieces of a sequence. It is not recorded, and axes.py says why."""
    return model.traced is not None and model.traced.pieces is not None and bool(model.traced.pieces.fault)


def check_traced(job: JobSpec, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports a user's own module whose forward pass could not be recorded, which is cut into stages."""
    if model.traced is None or model.traced.uncut is None:
        return
    reason, where = model.traced.uncut
    yield Diagnostic(
        "E0434",
        f"the network cannot be cut into stages: {reason}",
        job.parallelism.value_span("pipeline"),
        label=where,
        notes=(Note("the network", job.model.value_span("network")),),
        help="make it a sequence of blocks, with only tensors passed between them; or use the data axis",
    )


def check_schedule(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Checks the schedule's demands on ranks, micro-batches and virtual stages, and the size of its table."""
    parallelism, ranks = job.parallelism, layout.sizes["pipeline"]
    arguments = parallelism.schedule, ranks, layout.microbatches, layout.virtual_stages
    for demand in demands(*arguments):
        blamed = next(
            (f for f in ("microbatches", "virtual_stages", "schedule", "pipeline") if parallelism.is_set(f)), ""
        )
        shared = job.data.batch % layout.sizes["data"] == 0
        close = tuple(fitting_pieces(job, layout)) if shared else ()
        close = close or accepted_microbatches(arguments[0], arguments[1], arguments[3], arguments[2])
        yield Diagnostic(
            "E0412",
            demand,
            parallelism.value_span(blamed),
            notes=(Note("the schedule is set here", parallelism.value_span("schedule")),)
            if parallelism.is_set("schedule") and blamed != "schedule"
            else (),
            help=either_field("parallelism.microbatches", close) if close else "another schedule",
        )


def check_size(job: JobSpec, layout: Layout, layers: int) -> Iterator[Diagnostic]:
    """Reports a step with too many passes to be planned; the limit is lower for networks with very many layers."""
    allowed = ACTIONS.most
    if layout.sizes["pipeline"] > 1:
        allowed = min(allowed, (WORK.most // 2 - layout.work(layers) + layout.passes // 8) * 8)
    if layout.passes <= allowed:
        return
    stages = layout.sizes["pipeline"] * layout.virtual_stages
    step = f"a step of {plural(layout.microbatches, 'micro-batch')}"
    if stages > 1:
        step = f"a schedule of {plural(layout.microbatches, 'micro-batch')} over {plural(stages, 'stage')}"
    fewer = allowed // 2 // stages
    yield Diagnostic(
        "E0413",
        step + (f" of {layers:,} layers" if allowed < ACTIONS.most else "") + " is too large to plan",
        job.parallelism.value_span("microbatches"),
        help=f"at most {plural(fewer, 'micro-batch')}" if fewer >= layout.sizes["pipeline"] else "fewer stages",
    )


def check_stages(
    job: JobSpec, layout: Layout, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> Iterator[Diagnostic]:
    """Checks that each rank trains something, each stage sends a gradient, and no rank updates a shared value alone."""
    span = job.parallelism.value_span("stages" if job.parallelism.is_set("stages") else "pipeline")
    names = trained(job, model)
    idle: dict[int, list[range]] = {}
    for rank in range(schedule.ranks):
        mine = [stage for stage, where in zip(stages, schedule.placement, strict=True) if where == rank]
        layers = [model.layers[n] for stage in mine for n in stage]
        if not any(q.first_name in names for layer in layers for q in layer.parameters):
            idle[rank] = mine
    if idle:
        yield Diagnostic(
            "E0432",
            f"the ranks at pipeline coordinate{'s' if len(idle) > 1 else ''} {shorten_list(list(map(str, idle)), 8)} "
            f"have nothing to train: {_named([stage for mine in idle.values() for stage in mine], model)}",
            span,
            help="fewer stages, or others by hand: `stages = […]`",
        )
    yield from _check_ends(job, model, stages, span)
    yield from _check_tied_rows(job, layout, model, stages, schedule)
    yield from _warn_of_repeated(job, model, stages, schedule)
    if "optimizer" in (moved := offloaded(job, layout)) and "parameters" not in moved:
        who = holders(model, stages, schedule.placement)
        for name in [name for name in who if len(who[name]) > 1 and name in names][:1]:
            yield Diagnostic(
                "E0716",
                f"the optimizer's state cannot be offloaded alone with `{name}`, whose gradient two stages add up",
                job.memory.value_span("offload"),
                notes=(Note("the stages are asked for here", span),),
                help=remedy(set_field("memory.offload", "[optimizer, parameters]"), " works"),
            )


def _check_tied_rows(
    job: JobSpec, layout: Layout, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> Iterator[Diagnostic]:
    """Reports a tied weight of two stages of one rank whose rows the shards do not divide. torch then pads them once
    for each stage, and the padded rows of one of them miss the updates.
    """
    sharding, names = sharding_of(job, layout), trained(job, model) - set(model.unused)
    if sharding.engine != "fsdp":
        return
    first: dict[tuple[str, int], tuple[int, str]] = {}  # weight and pipeline coordinate: the stage, and the name in it
    for number, (stage, rank) in enumerate(zip(stages, schedule.placement, strict=True)):
        for q in (q for n in stage for q in model.of_a_rank[n].parameters if q.first_name in names):
            other, name = first.setdefault((q.first_name, rank), (number, q.name))
            if other != number and name != q.name and q.shape[0] % sharding.shards:
                parallelism = job.parallelism
                yield Diagnostic(
                    "E0446",
                    f"the ranks at pipeline coordinate {rank} use `{q.first_name}` in two stages, and its "
                    f"{q.shape[0]:,} rows cannot be split into {sharding.shards} equal shards",
                    parallelism.value_span("schedule"),
                    label=f"stages {other} and {number} are on the same ranks",
                    notes=(Note("the shards are asked for here", parallelism.value_span("zero")),),
                    help=remedy(
                        set_field("parallelism.schedule", "1f1b"),
                        ", which places the stages on different ranks; or a number of rows that is a multiple of "
                        f"{sharding.shards}",
                    ),
                )
                return


def _warn_of_repeated(
    job: JobSpec, model: ModelGraph, stages: Sequence[range], schedule: ScheduleTable
) -> Iterator[Diagnostic]:
    """Warns of stages whose backward pass is not split, because they use a parameter again after others."""
    entries = repeated_uses(job, model, stages, schedule)
    if not entries:
        return
    (stage, (parameter, *places, other)), more = next(iter(entries.items())), len(entries) - 1
    where = " and ".join(f"`{name}`" for name in dict.fromkeys(places))
    yield Diagnostic(
        "W0664",
        f"`{schedule.name}` splits the backward pass in two, and torch cannot where a stage uses a parameter again "
        f"after another, as stage {stage} does `{parameter}` after `{other}`: it computes both halves at once, and "
        "the pipeline waits longer than planned",
        job.parallelism.value_span("schedule"),
        label=f"in {where}" + (f", and {plural(more, 'other stage')}" if more else ""),
        notes=(Note("the network", job.model.value_span("network")),),
        help=remedy(
            set_field("parallelism.schedule", "1f1b"),
            ", or another schedule with whole backward passes; or `stages` that part the two uses",
        ),
    )


def _check_ends(job: JobSpec, model: ModelGraph, stages: Sequence[range], span: Span | None) -> Iterator[Diagnostic]:
    """Checks that the last layer of each stage can be sent. Reports the first that cannot, and the number of others."""
    wrong = [stage[-1] for stage in stages[:-1] if unsendable(model, stage[-1])]
    if not wrong:
        return
    last, reason = model.layers[wrong[0]], unsendable(model, wrong[0])
    others = [_name(model.layers[n]) for n in wrong[1:]]
    label = f"nor with {shorten_list(others)}" if others else ""
    if model.traced is None:
        yield Diagnostic(
            "E0432",
            f"a stage cannot end with `{last.name}`: {reason}",
            span,
            label=label,
            help="the embedding belongs to the same stage",
        )
        return
    yield Diagnostic(
        "E0435",
        f"a stage cannot end with {_name(last)}, before {_name(model.layers[wrong[0] + 1])}: {reason}",
        span,
        label=label,
        notes=(Note("the network", job.model.value_span("network")),),
        help=_places(model),
    )


def _places(model: ModelGraph) -> str:
    """Names the places at which a traced module can be cut."""
    ends = [_name(layer) for n, layer in enumerate(model.layers[:-1]) if not unsendable(model, n)]
    if not ends:
        return "no cut of it is possible: make it a sequence of blocks, with one tensor between them"
    return f"stages can end with {shorten_list(ends, 6)}"


def _named(stages: Sequence[range], model: ModelGraph) -> str:
    def names() -> Iterator[str]:
        for stage in stages:
            yield from (_name(model.layers[n]) for n in stage)

    return shorten_list(list(names()))


def _name(layer: LayerNode) -> str:
    return f"`{layer.name}`" if layer.name else "what belongs to no layer"
