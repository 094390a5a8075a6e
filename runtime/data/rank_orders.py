"""The samples of every data rank over many steps at once, as the sampler deals them out.

The order is the sampler's (sampler.py), which is a pure function: nothing here runs a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from dslc.compiler.ir.program import DataStep, RankPlace
from dslc.runtime.data.sampler import shares, steps_per_epoch


def place_of(data_rank: int, data_ranks: int) -> RankPlace:
    """Returns the place of a rank on the data axis alone."""
    return RankPlace(
        rank=data_rank, node=0, local_rank=data_rank, coordinates={}, data_rank=data_rank, data_ranks=data_ranks
    )


def samples_by_rank(step: DataStep, data_ranks: int, epoch: int, steps: int) -> list[Tensor]:
    """Returns the training samples of each data rank in the first `steps` steps of an epoch, in order."""
    steps = min(steps, steps_per_epoch(step))
    full = min(steps, step.visited // step.batch)
    by_rank = []
    for data_rank in range(data_ranks):
        place = place_of(data_rank, data_ranks)
        samples = [shares(step, place, epoch, 0, full)] if full else []
        samples += [shares(step, place, epoch, full)] if steps > full else []
        by_rank.append(torch.cat(samples) if samples else torch.empty(0, dtype=torch.int64))
    return by_rank


def classes_by_rank(
    step: DataStep, data_ranks: int, steps: int, classes: Mapping[int, int]
) -> dict[int, tuple[int, ...]]:
    """Returns for each class how many samples of it each data rank trains on in the first epoch, of at most `steps`
    steps. `classes` has the class of each sample that was read, by its number.
    """
    counts = [
        Counter(classes[number] for number in samples.tolist() if number in classes)
        for samples in samples_by_rank(step, data_ranks, 0, steps)
    ]
    return {name: tuple(count[name] for count in counts) for name in sorted(set(classes.values()))}
