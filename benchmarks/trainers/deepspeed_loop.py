"""The loop with DeepSpeed: `torchrun --nproc-per-node 2 -m benchmarks.trainers.deepspeed_loop gpt zero …`."""

from __future__ import annotations

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.handwritten import GPT, mean_loss
from benchmarks.trainers.task import MICROBATCHES, Task, keep_batch, read_task


class Embedding(nn.Module):
    """The first layer of a pipeline."""

    def __init__(self, network: GPT) -> None:
        super().__init__()
        self.embedding, self.position = network.embedding, network.position

    def forward(self, x: Tensor) -> Tensor:
        assert self.embedding is not None and self.position is not None
        embedded: Tensor = self.embedding(x) + self.position
        return embedded


def make_engine(task: Task) -> Any:
    network = task.workload.model
    network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload] # it refuses channels last
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": task.batch,
        "zero_optimization": {"stage": 3 if task.way == "zero" else 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default DeepSpeed clips at 1
        "steps_per_print": 10**9,
    }
    if task.way == "tensor":
        layers = [
            {"patterns": [r".*\.(qkv|up)\.weight$"], "partition_type": "column"},
            {"patterns": [r".*\.(projection|down)\.weight$"], "partition_type": "row"},
        ]
        config["tensor_parallel"] = {
            "autotp_size": 2,
            "partition_config": {"use_default_specs": False, "layer_specs": layers},
        }
    if task.way == "pipeline" and isinstance(network, GPT):
        config |= {
            "train_micro_batch_size_per_gpu": task.batch // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
        }
        parts: list[Any] = [Embedding(network), *network.blocks, network.norm, network.head]
        network = deepspeed.PipelineModule(parts, num_stages=2, loss_fn=mean_loss, partition_method="type:Block")
    engine, *_ = deepspeed.initialize(
        model=network, optimizer=task.workload.make_optimizer(network.parameters()), config=config
    )
    return engine


def main() -> None:
    deepspeed.init_distributed()
    task = read_task()
    engine = make_engine(task)
    size = engine.train_micro_batch_size_per_gpu()
    if task.way in ("tensor", "pipeline"):  # both ranks work on the whole batch
        loader = DataLoader(task.samples, size, collate_fn=keep_batch)
    else:
        sampler: DistributedSampler[Tensor] = DistributedSampler(task.samples, shuffle=False)
        loader = DataLoader(task.samples, size, sampler=sampler, collate_fn=keep_batch)
    batches = iter(loader)
    for _ in range(task.steps):
        if task.way == "pipeline":
            loss = engine.train_batch(data_iter=batches)
        else:
            x, y = next(batches)
            loss = mean_loss(engine(x), y)
            engine.backward(loss)
            engine.step()
        task.timer.record(loss)


if __name__ == "__main__":
    main()
