"""Rules for tensors of a module that ranks cannot share out or exchange. E0675, E0720 to E0729."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dslc.compiler.ir.nodes import ModelGraph
from dslc.compiler.ir.tensors import UNSENDABLE
from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.sharding import Engine, low_copy, offloaded, sharding_of, trained
from dslc.dsl.diagnostics import Diagnostic, Note
from dslc.dsl.language.calls import Bf16, Fp16
from dslc.dsl.language.job import JobSpec
from dslc.dsl.remedy import Edit, remedy, set_field
from dslc.dsl.source import Span

if TYPE_CHECKING:
    from dslc.compiler.ir.module_facts import ModelFacts


def check_own_model(job: JobSpec, layout: Layout, facts: ModelFacts, model: ModelGraph) -> Iterator[Diagnostic]:
    """Reports parts of a traced module that cannot be sharded."""
    engine = sharding_of(job, layout).engine
    if engine == "fsdp":
        yield from _check_numbers(job, layout, facts)
    if engine in ("fsdp", "zero1"):
        yield from _check_dtypes(job, layout, facts, model)
    backend = "gloo" if layout.device == "cpu" else "NCCL"
    for name, _, dtype in facts.buffers if layout.world_size > 1 else ():
        if dtype in UNSENDABLE[layout.device]:
            yield Diagnostic(
                "E0675",
                f"the buffer `{name}` is of {dtype}, which {backend} does not send, and {layout.world_size} ranks "
                "begin with the buffers of the first",
                job.model.value_span("network"),
                help="a buffer of `int32`, `uint8` or `float32`, from which `forward` makes the other",
            )


def _check_dtypes(job: JobSpec, layout: Layout, facts: ModelFacts, model: ModelGraph) -> Iterator[Diagnostic]:
    """Checks for one dtype, which torch's ZeroRedundancyOptimizer and the units of `fully_shard` need."""
    dtypes = dict(facts.dtypes)
    found: dict[str, str] = {}  # a parameter of each dtype
    for name in sorted(trained(job, model)):
        found.setdefault(dtypes.get(name, "float32"), name)
    if len(found) > 1:
        yield Diagnostic(
            "E0721",
            "parameters that train have to be of one dtype to be sharded: "
            + ", ".join(f"`{name}` is {dtype}" for dtype, name in found.items()),
            sharding_span(job, layout),
            notes=(Note("the network", job.model.value_span("network")),),
            help=remedy("make them of one dtype, or freeze one kind of them", or_else(job, layout, "none", "ddp")),
        )


def sharding_span(job: JobSpec, layout: Layout) -> Span | None:
    """Returns the span of the field that asks for sharded parameters."""
    if job.parallelism.zero:
        return job.parallelism.value_span("zero")
    if low_copy(job):
        return job.train.value_span("precision")
    if "parameters" in offloaded(job, layout):
        return job.memory.value_span("offload")
    beside = next(axis for axis, size in layout.sizes.items() if axis != "data" and size > 1)
    return job.parallelism.value_span(beside)


def or_else(job: JobSpec, layout: Layout, *fine: Engine, copies: bool = False) -> str:
    """Returns the change of `less_sharded` as a further advice; "" if there is none."""
    change = less_sharded(job, layout, *fine, copies=copies)
    return remedy("; or ", change) if change is not None else ""


def less_sharded(job: JobSpec, layout: Layout, *fine: Engine, copies: bool = False) -> Edit | None:
    """Returns the first change, if one is enough, after which the engine is one of `fine`, or with `copies` any one
    under which each rank has a full copy.
    """
    parallelism, train = job.parallelism, job.train
    changes = {
        set_field("parallelism.zero", zero): replace(job, parallelism=replace(parallelism, zero=zero))
        for zero in reversed(range(parallelism.zero))
    }
    if isinstance(train.precision, Bf16 | Fp16):
        low = set_field("train.precision.level", "O1")
        changes[low] = replace(job, train=replace(train, precision=replace(train.precision, level="O1")))
    shardings = {edit: sharding_of(changed, layout) for edit, changed in changes.items()}
    return next((edit for edit, s in shardings.items() if s.engine in fine or (copies and s.shards == 1)), None)


def _check_numbers(job: JobSpec, layout: Layout, facts: ModelFacts) -> Iterator[Diagnostic]:
    """Reports parameters without elements, and those without rows to cut."""
    empty = [name for name, shape, _ in facts.parameters if 0 in shape]
    numbers = [name for name, shape, _ in facts.parameters if not shape]
    nothing = "has no elements, which leaves nothing to be shared out"
    no_rows = "is a single number without a dimension, which has no rows to be shared out"
    for code, names, fault, help in (
        ("E0735", empty, nothing, "make it a buffer: `register_buffer`"),
        ("E0720", numbers, no_rows, "give it one: `nn.Parameter(torch.ones(1))`"),
    ):
        if names:
            yield Diagnostic(
                code,
                f"the parameter `{names[0]}` {fault}",
                sharding_span(job, layout),
                label=f"{len(names)} such parameters" if len(names) > 1 else "",
                notes=(Note("the network", job.model.value_span("network")),),
                help=remedy(help, or_else(job, layout, "none", "ddp", "zero1")),
            )
