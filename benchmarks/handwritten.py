"""The loops that dslc is compared with: torch's own parts, hand-written as tightly as an expert would.

    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --steps 60 --out result.json
    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --zero 3 --out result.json
    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --pipeline --out result.json
    torchrun --nproc-per-node 2 benchmarks/handwritten.py gpt --tensor --out result.json
    torchrun --nproc-per-node 2 benchmarks/handwritten.py moe --out result.json
    python benchmarks/handwritten.py gpt2 --out result.json

Zero 0 is DistributedDataParallel; 1 is ZeroRedundancyOptimizer beside it; 2 and 3 are `fully_shard` of each block and
of the whole, which keeps or frees the parameters after the forward pass. `--fully-shard` uses it for zero 1 as well,
which with one micro-batch is zero 2. `--pipeline` is torch's Schedule1F1B over two stages with half of the blocks each,
`--tensor` its `parallelize_module` with pieces of the sequence between the matrices (with `--whole-sequence`, all of it
on each rank) and scores left in shares. `moe` is
a Llama with 8 experts in each block, which multiply by torch's `grouped_mm`, no token dropped. `gpt2` is GPT-2 of 124 M
parameters on one GPU, compiled with its loss, under autocast in bfloat16.

Samples are gathered from tensors in memory, the optimizer is fused, buckets are views, the graph is static, and the
host waits for nothing in a step. Rank 0 writes {"first": …, "last": …, "steps": …, "loss": …}: seconds since the first
step began, and the last step's loss over all ranks.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Passes = Callable[[Tensor, Tensor], list[Tensor]]  # forward and backward: this rank's losses


class Block(nn.Module):
    """The rows of `qkv` go head by head, so that a share of the rows is a share of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.qkv(self.norm1(x))
        batch, length, _ = rows.shape
        q, k, v = rows.view(batch, length, -1, 3, self.head_dim).unbind(3)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, -1))
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return output


class GPT(nn.Module):
    """A GPT; parts that belong to another stage are None."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128, vocab: int = 256) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = nn.Embedding(vocab, width)
        self.position: nn.Parameter | None = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm: nn.LayerNorm | None = nn.LayerNorm(width)
        self.head: nn.Linear | None = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            position = self.position
            x = self.embedding(x) + (position.to_local() if isinstance(position, DTensor) else position)
        x = self.blocks(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Experts(nn.Module):
    """A router and gated networks, of which each token uses `top_k`."""

    def __init__(self, width: int, experts: int, top_k: int, hidden: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        pairs = chosen.flatten()
        order = pairs.argsort()
        ends = pairs.bincount(minlength=self.gate.out_features).cumsum(0, dtype=torch.int32)
        gate, up = F.grouped_mm(tokens[order // self.top_k], self.gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        rows = rows * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.top_k, rows).view_as(x)


class ExpertBlock(nn.Module):
    """A block of a Llama with experts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.experts = Experts(width, experts=8, top_k=2, hidden=128)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        q, k = turn(q, cosines, sines), turn(k, cosines, sines)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        output: Tensor = x + self.experts(self.norm2(x))
        return output


def turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Returns heads turned by the angles of their positions."""
    one, other = x.chunk(2, -1)
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines), -1)


class Llama(nn.Module):
    """A Llama whose blocks have experts; the angles of positions are computed once."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 128, vocab: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(ExpertBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, vocab, bias=False)
        pairs = torch.arange(0, width // heads, 2) / (width // heads)
        angles = (torch.arange(context)[:, None] * 10_000.0**-pairs)[:, None]
        self.cosines, self.sines = angles.cos(), angles.sin()
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        output: Tensor = self.head(self.norm(x))
        return output


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def library() -> Tensor:
    """Returns the text of Python's standard library, in bytes."""
    parts = []
    for path in sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))):
        with open(path, "rb") as file:
            parts.append(file.read())
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def mean_loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Workload:
    """A network, and samples of which a step takes `batch` in the order of `order`."""

    model: nn.Module
    gather: Callable[[Tensor], tuple[Tensor, Tensor]]  # inputs and targets of the samples with these numbers
    samples: int
    batch: int

    @property
    def order(self) -> Tensor:
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(1))

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Makes a fused optimizer. It takes no group with DTensors and other tensors."""
        if isinstance(self.model, GPT | Llama):
            of_kind: dict[bool, list[nn.Parameter]] = {}
            for parameter in parameters:
                of_kind.setdefault(isinstance(parameter, DTensor), []).append(parameter)
            return torch.optim.AdamW([{"params": group} for group in of_kind.values()], lr=1e-3, fused=True)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def load_workload(what: str) -> Workload:
    """Returns the workload, with the same weights and samples in every process."""
    torch.manual_seed(1)
    if what == "convnet":
        model = convnet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        images = torch.randn(4096, 3, 32, 32).to(memory_format=torch.channels_last)
        labels = torch.randint(10, (4096,))
        return Workload(model, lambda chosen: (images[chosen], labels[chosen]), samples=4096, batch=64)
    tokens, context = library(), 128
    window = torch.arange(context + 1)

    def gather(chosen: Tensor) -> tuple[Tensor, Tensor]:
        text = tokens[chosen[:, None] * context + window].long()
        return text[:, :-1], text[:, 1:]

    return Workload(GPT() if what == "gpt" else Llama(), gather, samples=(len(tokens) - 1) // context, batch=16)


def by_data(model: nn.Module, zero: int) -> Passes:
    wrapped = model
    if zero < 2:
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False
        )
    else:
        shard_by_block(model, zero)

    def passes(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = mean_loss(wrapped(x), y)
        loss.backward()
        return [loss]

    return passes


def shard_by_block(model: nn.Module, zero: int, mesh: DeviceMesh | None = None) -> None:
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if zero == 3 else False)


def by_pipeline(model: GPT, microbatches: int) -> Passes:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, blocks = dist.get_rank(), list(model.blocks)
    half = len(blocks) // 2
    if rank == 0:
        model.blocks, model.norm, model.head = nn.Sequential(*blocks[:half]), None, None
    else:
        model.embedding, model.position, model.blocks = None, None, nn.Sequential(*blocks[half:])

    def part_of_mean(scores: Tensor, target: Tensor) -> Tensor:
        return mean_loss(scores, target) / microbatches

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=part_of_mean, scale_grads=False)

    def passes(x: Tensor, y: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x, return_outputs=False)
        else:
            schedule.step(target=y, losses=losses, return_outputs=False)
        return losses

    return passes


def shard_matrices(model: GPT, mesh: DeviceMesh, *, whole_sequence: bool = False) -> None:
    """Cuts the matrices along the tensor axis, with scores left in shares; between the matrices a rank has a piece of
    the sequence, or all of it.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor import parallel as t

    between = Replicate() if whole_sequence else Shard(1)
    norm = {} if whole_sequence else {"norm": t.SequenceParallel()}
    norms = {} if whole_sequence else {"norm1": t.SequenceParallel(), "norm2": t.SequenceParallel()}
    for block in model.blocks:
        styles = {
            **norms,
            "qkv": t.ColwiseParallel(input_layouts=between),
            "projection": t.RowwiseParallel(output_layouts=between),
            "up": t.ColwiseParallel(input_layouts=between),
            "down": t.RowwiseParallel(output_layouts=between),
        }
        t.parallelize_module(block, mesh, styles)
    styles = {
        "embedding": t.RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        **norm,
        "head": t.ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    t.parallelize_module(model, mesh, styles)
    assert model.position is not None
    if not whole_sequence:
        model.position = nn.Parameter(distribute_tensor(model.position.detach(), mesh, [Shard(0)]))  # its piece


def by_tensor(model: GPT, *, whole_sequence: bool) -> Passes:
    from torch.distributed.tensor.parallel import loss_parallel

    shard_matrices(model, init_device_mesh("cpu", (dist.get_world_size(),)), whole_sequence=whole_sequence)

    def passes(x: Tensor, y: Tensor) -> list[Tensor]:
        with loss_parallel():
            loss = mean_loss(model(x), y)
            loss.backward()
        return [loss]

    return passes


def on_gpu(steps: int, out: str | None) -> None:
    torch.manual_seed(1)
    batch, context, vocab, samples = 16, 1024, 50304, 1024
    model = GPT(layers=12, width=768, heads=12, context=context, vocab=vocab)
    assert model.head is not None and model.embedding is not None
    model.head.weight = model.embedding.weight
    model.cuda()

    @torch.compile
    def loss_of(text: Tensor) -> Tensor:
        return mean_loss(model(text[:, :-1]), text[:, 1:])

    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    tokens = torch.randint(vocab, (samples, context + 1))
    order = torch.randperm(samples)
    first = 0.0
    start = time.perf_counter()
    for step in range(steps):
        at = (step * batch) % samples
        text = tokens[order[at : at + batch]].pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = loss_of(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            print(f"first step done, loss {loss.item():.3f}", flush=True)
            first = time.perf_counter() - start
    final = loss.item()
    last = time.perf_counter() - start
    if out:
        write(out, first, last, steps, final)


def write(out: str, first: float, last: float, steps: int, loss: float) -> None:
    with open(out, "w") as file:
        json.dump({"first": first, "last": last, "steps": steps, "loss": loss}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("gpt", "moe", "convnet", "gpt2"))
    parser.add_argument("--steps", type=int, default=60)
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    ways.add_argument("--pipeline", action="store_true", help="of gpt alone, as is `--tensor`")
    ways.add_argument("--tensor", action="store_true")
    parser.add_argument("--whole-sequence", action="store_true", help="with `--tensor`: no pieces of the sequence")
    parser.add_argument("--fully-shard", action="store_true", help="zero 1 by fully_shard too")
    parser.add_argument("--microbatches", type=int, default=8, help="of a pipeline")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    if arguments.what == "gpt2":
        on_gpu(arguments.steps, arguments.out)
        return
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"])))
    workload = load_workload(arguments.what)
    model, batch = workload.model, workload.batch
    zero = 2 if arguments.zero == 1 and arguments.fully_shard else arguments.zero
    share, own = batch // world, rank
    if isinstance(model, GPT) and (arguments.pipeline or arguments.tensor):
        if arguments.pipeline:
            passes = by_pipeline(model, arguments.microbatches)
        else:
            passes = by_tensor(model, whole_sequence=arguments.whole_sequence)
        share, own = batch, 0  # both ranks work on the whole batch
    else:
        passes = by_data(model, zero)
    optimizer: torch.optim.Optimizer
    if zero == 1:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-3, fused=True
        )
    else:
        optimizer = workload.make_optimizer(model.parameters())
    order = workload.order
    first = 0.0
    start = time.perf_counter()
    for step in range(arguments.steps):
        at = (step * batch) % (workload.samples - batch) + own * share
        losses = passes(*workload.gather(order[at : at + share]))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            loss = sum(loss.item() for loss in losses)
            first = time.perf_counter() - start
            if losses and own == 0:
                print(f"first step done, loss {loss:.3f}", flush=True)
    loss = sum(loss.item() for loss in losses)
    last = time.perf_counter() - start
    total = torch.tensor(float(loss))
    dist.all_reduce(total)  # of a pipeline, one stage has the loss
    if rank == 0 and arguments.out:
        write(arguments.out, first, last, arguments.steps, total.item() / (1 if arguments.pipeline else world))
    # An orderly exit aborts now and then: gloo's thread meets an interpreter that is going (see runtime/worker.py).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
