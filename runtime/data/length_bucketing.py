"""Orders samples so that samples of similar length share a global batch.

Model: the samples are shuffled, every `window` batches of them are sorted by length and cut into batches, and the
batches of an epoch are shuffled. Within a batch the samples are spread: its first half has every other of them by
length, the first quarter every fourth. So ranks, which take contiguous shares, have about as much to do. The samples of
the last batch, which is partial and may be dropped, are any.

Contract: each sample is visited once an epoch, whatever the lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grouped(lengths: Tensor, batch: int, window: int, random: torch.Generator) -> Tensor:
    """Returns the order of an epoch: a permutation of the samples, int64. `lengths` has shape (samples,)."""
    order = torch.randperm(len(lengths), generator=random)
    full = len(lengths) // batch
    batches = []
    for part in order[: full * batch].split(window * batch):
        by_length = part[lengths[part].argsort(descending=True, stable=True)]
        batches.append(by_length.view(-1, batch))
    if not batches:
        return order
    whole = torch.cat(batches)[torch.randperm(full, generator=random)][:, _spread(batch)]
    return torch.cat([whole.reshape(-1), order[full * batch :]])


def _spread(count: int) -> Tensor:
    """Returns the numbers below `count` in the order of their bits read backwards: any beginning of it is spread
    evenly.
    """
    width = max(1, (count - 1).bit_length())
    keys = [int(f"{n:0{width}b}"[::-1], 2) for n in range(count)]
    return torch.tensor(keys).argsort()
