"""The loop with Lightning: `torchrun --nproc-per-node 2 -m benchmarks.trainers.lightning_loop gpt ddp …`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.handwritten import GPT, mean_loss, shard_by_block, shard_matrices
from benchmarks.trainers.task import Task, keep_batch, read_task


class TrainedModule(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.network = task, task.workload.model
        self.loss_context: Any = loss_parallel if task.way == "tensor" else nullcontext

    def configure_model(self) -> None:
        if self.task.way == "zero":
            shard_by_block(self.network, 3, self.device_mesh["data_parallel"])
        elif self.task.way == "tensor" and isinstance(self.network, GPT):
            shard_matrices(self.network, self.device_mesh["tensor_parallel"])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        samples = self.task.samples
        ranks = self.trainer.distributed_sampler_kwargs
        sampler: DistributedSampler[Tensor] = DistributedSampler(samples, shuffle=False, **ranks)
        return DataLoader(samples, self.task.batch, sampler=sampler, collate_fn=keep_batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.task.workload.make_optimizer(self.network.parameters())

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        with self.loss_context():
            return mean_loss(self.network(batch[0]), batch[1])

    def backward(self, *arguments: Any, **options: Any) -> None:
        with self.loss_context():
            super().backward(*arguments, **options)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.task.timer.record(outputs["loss"])


def main() -> None:
    task = read_task()
    if task.way == "pipeline":
        raise SystemExit("Lightning has no strategy for pipelines")
    sizes = {"zero": (2, 1), "tensor": (1, 2)}.get(task.way)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_steps=task.steps, logger=False, enable_checkpointing=False,
        strategy=ModelParallelStrategy(*sizes) if sizes else "ddp",
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(TrainedModule(task))


if __name__ == "__main__":
    main()
