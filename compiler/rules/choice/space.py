"""The plans among which a search chooses: the values of each field, and what follows from them.

The axes are all splits of the devices into divisors. There is no list of supported combinations: a plan that a rule
refuses is a plan with that rule's code. Values without an effect are their defaults: `zero` over one rank, `schedule`
without a pipeline, `expert` without a `moe` layer. `parallelism.stages` is not searched, as `balanced` computes the
best cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import product
from math import gcd

from dslc.compiler.placement.layout import Layout
from dslc.compiler.placement.losses import mixtures
from dslc.compiler.placement.shares import divisors
from dslc.dsl.bounds import ACTIONS
from dslc.dsl.language.blocks import SCHEDULES
from dslc.dsl.language.calls import EveryNthBlock
from dslc.dsl.language.job import JobSpec
from dslc.dsl.meaning.auto_fields import SEARCHED
from dslc.dsl.record import Record, record

MOST_VIRTUAL_STAGES = 4
_RECOMPUTE: tuple[object, ...] = ("none", "selective", EveryNthBlock(n=2), "full")
_OFFLOAD: tuple[tuple[str, ...], ...] = (
    ("optimizer",),
    ("activations",),
    ("optimizer", "parameters"),
    ("optimizer", "activations"),
    ("optimizer", "parameters", "activations"),
)

Axes = tuple[int, int, int, int]  # pipeline, tensor, context, data
Sharding = tuple[int, int, int]  # `zero`, `replicas`, `expert`
Plan = dict[str, object]  # the values of all searched fields, by path


@record
class PlanSpace(Record):
    """The plans of a job that differ in the `fields`, which the compiler may choose; the rest are as the job says.

    `offload`: plans move memory to the host, if that field is searched; else none does.
    """

    job: JobSpec
    layout: Layout  # of its devices, on the data axis
    fields: Collection[str]
    offload: bool = False

    def axes(self) -> list[Axes]:
        """Returns all splits of the devices; plans whose layers are cut alike are neighbours."""
        job, world = self.job.parallelism, self.layout.world_size
        searched = [self._divisors(name, world) for name in ("tensor", "context", "pipeline")]
        fixed = None if "parallelism.data" in self.fields else job.data
        axes = []
        for tensor, context, pipeline in product(*searched):
            ranks = tensor * context * pipeline
            data = max(1, world // ranks)
            if fixed is None and ranks * data == world:
                axes.append((pipeline, tensor, context, data))
            elif fixed is not None and ranks * fixed == world:
                axes.append((pipeline, tensor, context, fixed))
        # Axes that no split suits are those of the job, which a rule refuses.
        return axes or [(job.pipeline, job.tensor, job.context, fixed or self.layout.sizes["data"])]

    def _divisors(self, name: str, of: int) -> list[int]:
        if f"parallelism.{name}" not in self.fields:
            return [getattr(self.job.parallelism, name)]
        return divisors(of)

    def sharding(self, axes: Axes) -> list[Sharding]:
        """Returns the values of `zero`, `replicas` and `expert`."""
        *_, context, data = axes
        parallelism, ranks = self.job.parallelism, context * data
        levels: Collection[int] = [parallelism.zero]
        if "parallelism.zero" in self.fields:
            levels = range(4) if ranks > 1 else (0,)
        values = []
        for zero in levels:
            copies: Collection[int] = [parallelism.replicas]
            if "parallelism.replicas" in self.fields:
                copies = divisors(data) if zero else [1]
            values += [(zero, n, experts) for n in copies for experts in self._expert_ranks(data // n)]
        return values

    def _expert_ranks(self, ranks: int) -> list[int]:
        """Returns the values of `expert` among the ranks that share a copy."""
        if "parallelism.expert" not in self.fields:
            return [self.job.parallelism.expert]
        stacks = [mixture.experts for mixture in mixtures(self.job)]
        return divisors(gcd(ranks, *stacks) if stacks else 1)

    def pieces(self, axes: Axes) -> list[int | None]:
        """Returns the values of `microbatches`: the divisors of a data rank's share of a batch."""
        if "parallelism.microbatches" not in self.fields:
            return [self.job.parallelism.microbatches]
        share = self.job.data.batch // (1 if self.job.parallelism.data_shares else axes[3])
        most = ACTIONS.most // (2 * axes[0])
        return [n for n in divisors(share) if n <= most] or [1]

    def sequences(self, axes: Axes) -> list[bool | None]:
        """Returns the values of `sequence`: pieces cost no memory or traffic on GPUs, so there only the default."""
        if "parallelism.sequence" not in self.fields:
            return [self.job.parallelism.sequence]
        tensor = axes[1]
        may_cut = tensor > 1 and self.layout.device == "cpu" and not self.job.model.has_user_network
        return [None, True] if may_cut else [None]

    def schedules(self, axes: Axes) -> list[tuple[str, int | None]]:
        """Returns the values of `schedule` and `virtual_stages`."""
        parallelism = self.job.parallelism
        name, stages = "parallelism.schedule", "parallelism.virtual_stages"
        words = SCHEDULES if name in self.fields else (parallelism.schedule,)
        if axes[0] == 1:
            return [("1f1b" if name in self.fields else parallelism.schedule,
                     None if stages in self.fields else parallelism.virtual_stages)]  # fmt: skip
        counts: list[int | None] = [parallelism.virtual_stages]
        if stages in self.fields:
            counts = list(range(1, MOST_VIRTUAL_STAGES + 1))
        return [(word, count) for word in words for count in counts]

    @cached_property
    def recomputations(self) -> tuple[object, ...]:
        return _RECOMPUTE if "memory.recompute" in self.fields else (self.job.memory.recompute,)

    @cached_property
    def offloads(self) -> tuple[tuple[str, ...], ...]:
        if "memory.offload" not in self.fields:
            return (self.job.memory.offload,)
        return _OFFLOAD if self.offload else ((),)

    @property
    def may_offload(self) -> bool:
        """True if plans that move memory to the host could be added to the space."""
        return "memory.offload" in self.fields and self.layout.device == "cuda" and not self.offload

    def plan(self, axes: Axes, sharding: Sharding, pieces: int | None, schedule: tuple[str, int | None],
             sequence: bool | None, recompute: object, offload: tuple[str, ...]) -> Plan:  # fmt: skip
        pipeline, tensor, context, data = axes
        values = (data, pipeline, tensor, context, *sharding, pieces, *schedule, sequence, recompute, offload)
        return dict(zip(SEARCHED, values, strict=True))

    def __iter__(self) -> Iterator[Plan]:
        for axes in self.axes():
            split = (self.sharding(axes), self.pieces(axes), self.schedules(axes), self.sequences(axes))
            yield from (self.plan(axes, *values) for values in product(*split, self.recomputations, self.offloads))

    @cached_property
    def size(self) -> int:
        return sum(
            len(self.sharding(axes)) * len(self.pieces(axes)) * len(self.schedules(axes)) * len(self.sequences(axes))
            for axes in self.axes()
        ) * len(self.recomputations) * len(self.offloads)  # fmt: skip
