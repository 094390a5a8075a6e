"""The loop that torchrun starts again in `python -m benchmarks faults`: it goes on from its own newest checkpoint.

    torchrun --nnodes 3 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint HOST benchmarks/surviving.py OUT STEPS

A checkpoint is whole when it has its name; rank 0 writes it into `….part` first. `metrics.jsonl` is cut back to the
checkpoint at each start, and a line is appended for each step. All hosts see OUT.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EVERY, BATCH, SAMPLES = 20, 48, 960
TIMEOUT = datetime.timedelta(seconds=25)  # of a collective, as `launch.timeout` of the job


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    part = path / f"step-{step:08}.part"
    part.mkdir(parents=True, exist_ok=True)
    with open(part / "state.pt", "wb") as file:
        torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    part.rename(part.with_suffix(""))


def cut_back(metrics: Path, step: int) -> None:
    """Leaves the lines of the steps up to this one."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    new = metrics.with_suffix(".new")
    new.write_text("".join(kept))
    new.replace(metrics)


def main() -> None:
    out, steps = Path(sys.argv[1]), int(sys.argv[2])
    checkpoints, metrics = out / "checkpoints", out / "metrics.jsonl"
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    log = out / "logs" / f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}" / f"rank-{rank}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x, y = torch.rand(SAMPLES, 64), torch.randint(10, (SAMPLES,))
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer, done = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 0
    found = sorted(path for path in checkpoints.glob("step-*") if path.suffix != ".part")
    if found:
        state = torch.load(found[-1] / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    if rank == 0:
        cut_back(metrics, done)
    dist.barrier()  # all have read the same
    wrapped, share = DistributedDataParallel(model), BATCH // world
    with open(metrics, "a") if rank == 0 else open(os.devnull, "w") as lines:
        for step in range(done + 1, steps + 1):
            at = step * BATCH % SAMPLES + rank * share
            loss = F.cross_entropy(wrapped(x[at : at + share]), y[at : at + share])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach()
            dist.all_reduce(mean)
            lines.write(json.dumps({"step": step, "loss": mean.item() / world}) + "\n")
            lines.flush()
            if step % EVERY == 0 and rank == 0:
                save(checkpoints, step, model, optimizer)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see handwritten.py


if __name__ == "__main__":
    main()
