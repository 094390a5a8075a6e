"""The rules: reasons to reject a job that do not concern one value (`dsl/meaning/resolve`), a shape (`compiler/model`),
an axis (`compiler/placement/layout`), a share (`compiler/placement/workload`) or a stage (`compiler/cost/stages`).

Pure functions over the facts known so far; None is an unknown. Codes: E03xx data and evaluation, E04xx parallelism,
E06xx training, E08xx features that this version plans but cannot run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from dslc.compiler.ir.facts import SourceFacts
from dslc.compiler.model.model import ModelGraph
from dslc.compiler.placement.exchange import exchange_of
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.shares import deal
from dslc.compiler.placement.tensor_plan import TensorPlan
from dslc.compiler.placement.workload import Workload, in_steps, loss_divisor, steps_of
from dslc.compiler.rules.parallelism.async_tensor import check_async_tensor
from dslc.compiler.rules.parallelism.axes import check_context, check_tensor
from dslc.compiler.rules.parallelism.exchange import check_warmup
from dslc.compiler.rules.parallelism.experts import check_experts
from dslc.compiler.rules.training.metrics import takes_classes
from dslc.dsl.diagnostics import Diagnostic, Note, division
from dslc.dsl.language import calls as c
from dslc.dsl.language.job import JobSpec
from dslc.dsl.language.layers import BatchNorm, PythonNetwork
from dslc.dsl.language.no_effect_warnings import changed, no_effect
from dslc.dsl.language.preferences import Preferences
from dslc.dsl.language.registry import Quantity, fields
from dslc.dsl.plain import plain
from dslc.dsl.remedy import Edit, Fix, remedy, remove_argument, remove_field, set_argument, set_field
from dslc.dsl.source import Span
from dslc.dsl.words import plural

# ------------------------------------------------------------------------------------------- data and evaluation


def check_sequence_length(job: JobSpec) -> Iterator[Diagnostic]:
    network = job.model.network
    for source in c.parts_of(job.data.source):
        if not isinstance(source, c.Stdlib | c.Text | c.Tokens | c.Chat | Preferences) or source.context is not None:
            continue
        if hasattr(network, "context"):
            return
        name = "max_length" if isinstance(source, c.Chat) else "context"
        yield Diagnostic(
            "E0310",
            f"neither `{source.word}` nor the network says how long a sequence is",
            job.data.value_span("source"),
            help=remedy(set_argument(source.span, name, 128, f"`{source.word}({name} = 128, …)`")),
        )


def check_batch_norm(job: JobSpec, layout: Layout, workload: Workload, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports a batch norm with fewer than two numbers per channel, over all ranks or on each alone."""
    if model.batch_norm_values is None:
        return
    measured = workload.measured  # a slow rank may get a single sample in each micro-batch
    smallest = 1 if measured else workload.smallest_share // layout.microbatches
    if workload.last_trained:
        last = deal(workload.last_trained, workload.shares) if workload.shares else ()
        smallest = min(smallest, *last, workload.last_trained // layout.sizes["data"])
    alone = model.unsynced_batch_norm or layout.sizes["data"] == 1
    numbers = model.batch_norm_values * max(1, smallest) * (1 if alone else layout.sizes["data"])
    if numbers < 2:
        span = job.parallelism.value_span("microbatches") if layout.microbatches > 1 else job.data.value_span("batch")
        span = job.parallelism.value_span("data_shares") if measured else span
        yield Diagnostic(
            "E0314",
            "batch norm would take its statistics from a single number for each channel",
            span,
            label="one sample at a time",
            notes=(Note("the network", job.model.value_span("network")),),
            help=f"{'`data_shares = […]`' if measured else 'more samples in a micro-batch'}, or `layer_norm`",
        )


# ------------------------------------------------------------------------------------------------------- training


def check_length(job: JobSpec, layout: Layout | None, workload: Workload | None) -> Iterator[Diagnostic]:
    train = job.train
    if workload is None or workload.steps is None:
        return
    yield from check_warmup(job, workload.steps)
    parts = {"warmup": "a warm-up", "rise": "a rise", "decay": "a fall"}
    times = {name: getattr(train.lr_schedule, name, None) for name in parts}
    spans = {name: steps_of(value, workload) or 0 for name, value in times.items() if isinstance(value, Quantity)}
    if sum(spans.values()) > workload.steps:
        longest = max(spans, key=lambda name: spans[name])
        long = [f"{parts[name]} of {plural(steps, 'step')}" for name, steps in spans.items() if steps]
        yield Diagnostic(
            "E0602",
            f"{' and '.join(long)} {'does' if len(long) == 1 else 'do'} not fit a training of {workload.steps}",
            train.lr_schedule.value_span(longest),
            help=remedy("a shorter one, as in ", set_field(f"train.lr_schedule.{longest}", "5%")),
        )
    for blk, what in ((job.evaluate, "evaluation"), (job.checkpoint, "checkpoint")):
        if what == "evaluation" and workload.split == "none" and not job.evaluate.training:
            continue  # W0103 reports that there is none
        every = blk.every
        steps = in_steps(every, workload) if every else None
        if steps is not None and steps > workload.steps:
            half = max(1, workload.steps // 2)
            yield Diagnostic(
                "W0603",
                f"the training ends after {plural(workload.steps, 'step')}, before the first {what} at step {steps}",
                blk.value_span("every"),
                help=remedy(set_field(f"{type(blk).word}.every", plural(half, "step"))),
            )
    if job.evaluate.training and workload.stream is not None:
        yield Diagnostic(
            "E0340",
            "the training split is a stream, which is read once an epoch by the training alone",
            job.evaluate.value_span("training"),
            help=remedy(remove_field("evaluate.training"), ", or give a data set with a length"),
        )
    exchange = exchange_of(job, layout) if layout is not None else None
    if exchange is not None and exchange.differ and exchange.first_step > workload.steps:
        yield Diagnostic(
            "W0603",
            f"the training ends after {plural(workload.steps, 'step')}, before the first exchange of weights at step "
            f"{exchange.first_step}: its ranks never agree",
            job.parallelism.value_span("gradients"),
            help=remedy("a shorter period, or ", set_field("parallelism.gradients", "allreduce()", "`allreduce()`")),
        )


# ---------------------------------------------------------------------------------------------------- parallelism


def check_axes(
    job: JobSpec, layout: Layout, source: SourceFacts, model: ModelGraph | None, cuts: TensorPlan | None
) -> Iterator[Diagnostic]:
    parallelism, sizes = job.parallelism, layout.sizes
    shards, replicas = sizes["data"], parallelism.replicas
    if shards % replicas:
        yield Diagnostic(
            "E0403",
            f"{replicas} replicas cannot be kept inside a data axis of {shards}",
            parallelism.value_span("replicas"),
            label=division(shards, replicas),
            help=remedy(set_field("parallelism.replicas", gcd(shards, replicas), "a divisor of the data axis")),
        )
    if parallelism.expert > 1:
        yield from check_experts(job, layout, model)
    if parallelism.zero and shards * sizes["context"] == 1:
        yield Diagnostic(
            "W0402",
            f"`parallelism.zero = {parallelism.zero}` shards over the data axis, which has one rank",
            parallelism.value_span("zero"),
            help=remedy(remove_field("parallelism.zero", "leave it out"), ", or use more data-parallel ranks"),
        )
    if sizes["tensor"] > 1:
        yield from check_tensor(job, layout, source, model, cuts)
    if sizes["context"] > 1:
        yield from check_context(job, layout, source, model)
    yield from check_async_tensor(job, layout, cuts)


# ------------------------------------------------------------------------------------------------------ invariants


def check_ignored(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    loss, target, data = job.model.loss, source.target, job.data
    if isinstance(loss, c.NetworkLoss) and loss.mean_of is None and isinstance(job.model.network, PythonNetwork):
        for name in ("ignore", "shift"):
            if changed(loss, name):
                why = "it is for the part of a batch that `mean_of` names"
                yield no_effect(f"model.loss.{name}", why, loss.name_span(name))
    if not isinstance(loss, c.PythonLoss) or loss.over or not changed(loss, "ignore"):
        return
    fills = data.pad is not None or data.has_documents
    if target is not None and target.dtype != "int64":
        why = "the data's targets are not whole numbers, and all of them count"
    elif loss_divisor(job, source) == "own" and not fills and not any(map(takes_classes, job.evaluate.metrics)):
        why = "the loss itself says which targets count"
    else:
        return
    yield no_effect("model.loss.ignore", why, loss.name_span("ignore"))


def warn_of_samples(job: JobSpec, source: SourceFacts) -> Iterator[Diagnostic]:
    if source.changes is not None:
        yield Diagnostic(
            "W0610",
            f"sample {source.changes} differs when it is read again, as the data set keeps a random generator of its "
            "own: the training depends on the number of ranks and workers, and on where it was resumed",
            job.data.value_span("source"),
            help="draw from `random`, `numpy.random` or `torch`: they are seeded anew for each sample, from the seed, "
            "the epoch and the sample's number",
        )


def warn_of_invariants(job: JobSpec, layout: Layout, model: ModelGraph | None) -> Iterator[Diagnostic]:
    """Warns of each field that breaks an invariant of the language."""
    data = layout.sizes["data"]
    if isinstance(job.train.precision, c.Fp16) and (layout.world_size > 1 or layout.microbatches > 1):
        yield Diagnostic(
            "W0609",
            "in fp16 overflows set the scale of the loss, and rounding decides where they occur: other steps may be "
            f"skipped than in one process{'' if layout.world_size > 1 else ' that takes a batch whole'}",
            job.train.value_span("precision"),
            help=remedy(set_field("train.precision", "bf16", "`bf16`"), " needs no loss scaling"),
        )
    if model is None:
        return
    if model.batch_norm and layout.microbatches > 1:
        yield Diagnostic(
            "W0606",
            f"batch statistics are taken over each of {layout.microbatches} micro-batches, not over the whole batch",
            job.parallelism.value_span("microbatches"),
            help="`layer_norm` or `rms_norm` do not depend on how a batch is cut",
        )
    if model.unsynced_batch_norm and data > 1:
        yield Diagnostic(
            "W0607",
            f"`batch_norm(sync = false)` takes statistics on each of {data} ranks alone: the training depends on "
            "their number",
            job.model.value_span("network"),
            help=remedy(_synchronized(job), " for statistics over all ranks"),
        )


def _synchronized(job: JobSpec) -> Fix | str:
    """Returns the removal of `sync` in each batch norm of the network."""
    network = job.model.network
    layers = network if isinstance(network, tuple) else ()
    calls = [layer for layer in layers if isinstance(layer, BatchNorm) and not layer.sync]
    edits = [remove_argument(layer.span, "sync") for layer in calls]
    return Fix(tuple(edit for edit in edits if isinstance(edit, Edit)), "leave `sync` out")


# ------------------------------------------------------------------------------------------------------- launching


def check_launch_texts(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports control characters in a text of `launch.with`.

    A second line of a partition would be a command in SLURM's script, and other launchers pass texts on likewise.
    """
    call = job.launch.with_
    for field in fields(type(call)):
        value = getattr(call, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and plain(text) != text:
                yield Diagnostic(
                    "E0835",
                    f"`{call.word}` would pass on `{plain(text)}`, which has control characters in it",
                    call.value_span(field.name),
                    help="one line of plain text; several options are several texts of the list",
                )
                break


def check_hosts(job: JobSpec, layout: Layout) -> Iterator[Diagnostic]:
    """Reports hosts that are not one for each node, or that `ssh` would not take for a host."""
    call = job.launch.with_
    if not isinstance(call, c.SSH):
        return
    odd = [host for host in call.hosts if not host or host.startswith("-") or any(map(str.isspace, host))]
    if odd:
        what, advice = f"`{odd[0]}` is no host", 'a name or an address, as `"host1"` or `"user@host1"`'
    elif len(set(call.hosts)) < len(call.hosts):
        twice = next(host for n, host in enumerate(call.hosts) if host in call.hosts[:n])
        what, advice = f"`{twice}` is named twice, and a host is one node", "each host once"
    elif layout.nodes != len(call.hosts):
        what = f"`ssh` reaches {plural(len(call.hosts), 'host')}, and the job takes {plural(layout.nodes, 'node')}"
        advice = _host_for_each_node(len(call.hosts))
    else:
        return
    yield Diagnostic("E0823", what, call.value_span("hosts"), help=advice)


def _host_for_each_node(hosts: int) -> str:
    return (
        remedy(set_field("devices.nodes", hosts, f"`devices {{ nodes = {hosts} }}`"))
        if hosts
        else "a host for each node"
    )


# ------------------------------------------------------------------------------------- not carried out yet: W0801


def _instead_of_mpi(job: JobSpec) -> str:
    why = ": `mpi` needs a torch that was built with MPI, which none from PyPI is"
    if job.devices.gpus is None:
        return remedy(set_field("devices.backend", "gloo", "`gloo`"), " on CPUs, `nccl` on GPUs", why)
    return remedy("`gloo` on CPUs, ", set_field("devices.backend", "nccl", "`nccl`"), " on GPUs", why)


def check_supported(job: JobSpec) -> Iterator[Diagnostic]:
    """Reports each field whose feature this version checks, plans and draws but cannot run yet."""
    for what, span, help in _unsupported(job):
        yield Diagnostic(
            "W0801",
            f"{what} is checked and planned, but this version of dslc cannot run it yet",
            span,
            help=help or "`dslc check`, `plan` and `render` take the job as it is; `dslc run` refuses it",
            subject=what,
        )


def _unsupported(job: JobSpec) -> Iterator[tuple[str, Span | None, str]]:
    """Yields (feature, span, the feature that runs instead)."""
    if job.devices.backend == "mpi":
        yield "`backend = mpi`", job.devices.value_span("backend"), _instead_of_mpi(job)
