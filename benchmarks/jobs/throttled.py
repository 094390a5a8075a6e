"""The samples of throttled.plt. Rank 1 moves into the control group that `DSLC_SLOW_GROUP` names, which limits it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset


def source(samples: int, context: int, vocab: int) -> Dataset[tuple[Tensor, ...]]:
    group = os.environ.get("DSLC_SLOW_GROUP")
    if group and dist.is_initialized() and dist.get_rank() == 1:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    tokens = torch.randint(vocab, (samples, context + 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])
