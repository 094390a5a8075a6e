"""The loop with Accelerate: `torchrun --nproc-per-node 2 -m benchmarks.trainers.accelerate_loop gpt ddp …`."""

from __future__ import annotations

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ParallelismConfig
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from benchmarks.handwritten import mean_loss
from benchmarks.trainers.task import keep_batch, read_task


def make_accelerator(way: str) -> Accelerator:
    if way == "zero":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
        return Accelerator(cpu=True, fsdp_plugin=plugin)
    if way == "tensor":
        return Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2))
    if way == "pipeline":
        raise SystemExit("Accelerate has pipelines for inference alone: accelerate.inference.prepare_pippy")
    return Accelerator(cpu=True)


def main() -> None:
    task = read_task()
    accelerator = make_accelerator(task.way)
    model = task.workload.model
    model, optimizer, loader = accelerator.prepare(
        model,
        task.workload.make_optimizer(model.parameters()),
        DataLoader(task.samples, task.batch, collate_fn=keep_batch),
    )
    if task.way == "zero" and not isinstance(model, FSDPModule):
        raise SystemExit(f"on CPUs Accelerate ignores its plugin for FSDP, and makes a {type(model).__name__}")
    for x, y in loader:
        loss = mean_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        task.timer.record(loss)


if __name__ == "__main__":
    main()
