"""Compares steps whose phases are recorded with the same steps without, in turn, in the same two processes.

    torchrun --nproc-per-node 2 -m benchmarks.phases gpt --pairs 300

The steps are those of handwritten.py, on one batch; each side has a model of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.handwritten import GPT, by_data, convnet
from benchmarks.measure import interval
from dslc.runtime.data.batches import StepBatch
from dslc.runtime.measure.device_clock import DeviceClock
from dslc.runtime.measure.phases import PhaseClock

WARM_UP = 5  # steps of each side before the first pair
LAP = 50  # steps after which the clock's phases are read, as in a logged step


def step_of(what: str, x: Tensor, y: Tensor, clock_of: Callable[[nn.Module], PhaseClock | None]) -> Callable[[], None]:
    """Returns the function that does one step of a new model; `clock_of` makes the clock that records it."""
    model: nn.Module = GPT() if what == "gpt" else convnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    passes, clock = by_data(model, 0), clock_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = StepBatch([], len(x), 0)

    def between(batch: StepBatch, total: Tensor, number: int | Tensor) -> None:
        pass

    marked = between if clock is None else clock.wrap_between(between)

    def work(batch: StepBatch) -> None:
        (loss,) = passes(x, y)
        marked(batch, loss, 1)
        optimizer.step()
        optimizer.zero_grad()

    step = work if clock is None else clock.wrap(work)
    return lambda: step(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpt", "convnet"))
    parser.add_argument("--pairs", type=int, default=300)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    torch.manual_seed(1)
    if arguments.what == "gpt":
        x, y = torch.randint(256, (8, 128)), torch.randint(256, (8, 128))
    else:
        x, y = torch.randn(32, 3, 32, 32).to(memory_format=torch.channels_last), torch.randint(10, (32,))
    clocks: list[PhaseClock] = []

    def clock_of(model: nn.Module) -> PhaseClock:
        clocks.append(PhaseClock(rank, ranks, DeviceClock(torch.device("cpu")), model.parameters()))
        return clocks[0]

    steps = {
        "with": step_of(arguments.what, x, y, clock_of),
        "without": step_of(arguments.what, x, y, lambda model: None),
    }
    order, ratios = random.Random(1), []
    for pair in range(WARM_UP + arguments.pairs):
        seconds = {}
        for side in order.sample(list(steps), 2):
            dist.barrier()
            begin = time.perf_counter()
            steps[side]()
            seconds[side] = time.perf_counter() - begin
        if pair >= WARM_UP:
            ratios.append(seconds["with"] / seconds["without"])
        if pair % LAP == 0:
            clocks[0].finish_lap()
    if rank == 0:
        low, high = interval(sorted(ratios))
        print(
            f"a step of {arguments.what} with its phases recorded: {statistics.median(ratios):.4f} "
            f"[{low:.4f}, {high:.4f}] of one without ({len(ratios)} pairs)"
        )
    sys.stdout.flush()
    os._exit(0)  # as handwritten.py


if __name__ == "__main__":
    main()
