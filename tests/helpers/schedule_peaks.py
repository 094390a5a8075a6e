"""The peak of activations under a schedule, from the bytes that the memory account sums up at each action."""

from __future__ import annotations

from collections.abc import Sequence

from dslc.compiler.cost.schedule_cost import HeldBytes, bytes_beside
from dslc.compiler.placement.schedules import ScheduleTable


def peak_held(
    table: ScheduleTable, bytes_per_stage: Sequence[float], between_halves: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Returns for each rank the most bytes of activations it holds at once over all its stages.

    `bytes_per_stage` is the memory of one micro-batch at each stage from its F on; `between_halves` the memory held
    after I until W, by default the same. It is larger if torch keeps gradients there too.
    """
    between_halves = bytes_per_stage if between_halves is None else between_halves
    held_bytes = HeldBytes(kept=bytes_per_stage, between=between_halves)
    return tuple(
        max(bytes + held_bytes.microbatch_bytes(action) for action, bytes in bytes_beside(table, rank, held_bytes))
        for rank in range(table.ranks)
    )
