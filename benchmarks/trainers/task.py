"""What the loops of all tools share: the arguments, the samples in the order of handwritten.py, and the times."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from benchmarks.handwritten import Workload, load_workload, write

WAYS = ("ddp", "zero", "tensor", "pipeline")  # zero: the parameters are sharded too
MICROBATCHES = 8  # of a pipeline


class OrderedSamples(Dataset[tuple[Tensor, Tensor]]):
    """The samples of `steps` batches. A loader asks for those of a batch at once, and collates nothing."""

    def __init__(self, workload: Workload, steps: int) -> None:
        self.gather, self.order = workload.gather, workload.order[: steps * workload.batch]

    def __len__(self) -> int:
        return len(self.order)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.gather(self.order[torch.tensor(indices)])


def keep_batch(batch: Any) -> Any:
    """Collates what is a batch already."""
    return batch


@dataclass
class StepTimer:
    """Measures as handwritten.py does. The loss is read in the first step and in the last."""

    steps: int
    out: str
    start: float = field(default_factory=time.perf_counter)
    done: int = 0
    first: float = 0.0

    def record(self, loss: Tensor) -> None:
        """Ends a step; ends the process after the last one."""
        self.done += 1
        if self.done == 1:
            loss.item()
            self.first = time.perf_counter() - self.start
        if self.done == self.steps:
            total = torch.tensor(loss.item())
            last = time.perf_counter() - self.start
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                write(self.out, self.first, last, self.steps, total.item() / dist.get_world_size())
            sys.stdout.flush()
            os._exit(0)  # as handwritten.py


@dataclass(frozen=True)
class Task:
    workload: Workload
    way: str
    steps: int
    timer: StepTimer

    @property
    def samples(self) -> OrderedSamples:
        return OrderedSamples(self.workload, self.steps)

    @property
    def batch(self) -> int:
        """The samples of a step on one rank."""
        return self.workload.batch // (1 if self.way in ("tensor", "pipeline") else int(os.environ["WORLD_SIZE"]))


def read_task() -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("gpt", "convnet"))
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    timer = StepTimer(arguments.steps, arguments.out)
    return Task(load_workload(arguments.what), arguments.way, arguments.steps, timer)
