"""The loops that dslc is measured against: torch's own pieces by hand, as tight as an expert writes them.

    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --steps 60 --out result.json
    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --zero 3 --out result.json

Zero 0 is DistributedDataParallel; 1 is ZeroRedundancyOptimizer beside it; 2 and 3 are `fully_shard` of each block and
of the whole, which keeps or lets go the parameters after the forward pass. `--fully-shard` has zero 1 by it as well,
which with one micro-batch is zero 2.

Samples are gathered from tensors in memory, the optimizer is fused, buckets are views, the graph is static, and the
host waits for nothing in a step. Rank 0 writes {"first": …, "last": …, "steps": …}: seconds since the first step began.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import sysconfig
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128, vocab: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def library() -> Tensor:
    """The text of Python's standard library, in bytes."""
    parts = []
    for path in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        with open(path, "rb") as file:
            parts.append(file.read())
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def share_out(model: nn.Module, zero: int) -> nn.Module:
    """What the loop calls."""
    if zero < 2:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=zero == 3)
    fully_shard(model, reshard_after_forward=None if zero == 3 else False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpt", "convnet"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--fully-shard", action="store_true", help="zero 1 by fully_shard too")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))
    torch.manual_seed(1)
    if arguments.what == "gpt":
        model: nn.Module = GPT()
        tokens, context, batch = library(), 128, 16
        samples = (len(tokens) - 1) // context
        window = torch.arange(context + 1)
    else:
        model = convnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(4096, 3, 32, 32).to(memory_format=torch.channels_last)
        labels = torch.randint(10, (4096,))
        samples, batch = 4096, 64
    zero = 2 if arguments.zero == 1 and arguments.fully_shard else arguments.zero
    wrapped = share_out(model, zero)
    optimizer: torch.optim.Optimizer
    if arguments.what == "convnet":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    elif zero == 1:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(1))
    share = batch // world
    first = 0.0
    start = time.perf_counter()
    for step in range(arguments.steps):
        at = (step * batch) % (samples - batch) + rank * share
        chosen = order[at : at + share]
        if arguments.what == "gpt":
            text = tokens[chosen[:, None] * context + window].long()
            x, y = text[:, :-1], text[:, 1:]
            loss = F.cross_entropy(wrapped(x).flatten(0, 1), y.flatten())
        else:
            loss = F.cross_entropy(wrapped(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:
            loss.item()
            first = time.perf_counter() - start
            if rank == 0:
                print(f"first step done, loss {loss.item():.3f}", flush=True)
    loss.item()
    last = time.perf_counter() - start
    if rank == 0 and arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"first": first, "last": last, "steps": arguments.steps}, file)
    # An orderly exit aborts now and then: gloo's thread meets an interpreter that is going (see runtime/worker.py).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
