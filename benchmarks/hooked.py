"""The loop of benchmarks/jobs/wide.plt by hand: DistributedDataParallel, with a communication hook of torch's own.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=host1 MASTER_PORT=29400 python benchmarks/hooked.py fp16 OUT

Rank 0 writes the seconds since the start of the first step, after each step, as a list.
"""

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 24, 64


def bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own refuses every backend but NCCL by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


def main() -> None:
    kind, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    # One bucket: with several, torch's PowerSGD issues collectives from gloo's threads in no order that ranks share.
    whole = 100.0 if kind == "powersgd" else None
    model = DistributedDataParallel(network, gradient_as_bucket_view=True, bucket_cap_mb=whole)
    if kind == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "bf16":
        model.register_comm_hook(None, bf16)
    elif kind == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=True)
    share = BATCH // dist.get_world_size()
    inputs, targets = torch.rand(STEPS, share, 1, 8, 8), torch.randint(10, (STEPS, share))
    begun, seconds = time.perf_counter(), []
    for x, y in zip(inputs, targets, strict=True):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(seconds, file)
    sys.stdout.flush()
    os._exit(0)  # an interpreter that gloo's threads outlive may abort


if __name__ == "__main__":
    main()
