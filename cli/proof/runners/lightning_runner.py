"""Trains with Lightning as its users do: a `LightningModule`, and a `Trainer` with the arguments of the file."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    as_section,
    count_targets,
    leave_curve,
    load_network,
    load_program,
    load_samples,
    mean_over_ranks,
    read_setup,
)

if TYPE_CHECKING:
    import torch
    from lightning import Trainer

_PRECISIONS = ("16", "bf16", "64")
# Arguments that change no update, or whose objects belong to the user's program.
_LEFT_OUT = ("logger", "callbacks", "plugins", "profiler", "default_root_dir", "resume_from_checkpoint", "num_nodes",
             "limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval", "fast_dev_run",
             "check_val_every_n_epoch", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs", "max_time",
             "sync_batchnorm", "benchmark", "overfit_batches", "enable_checkpointing", "max_epochs", "min_epochs",
             "min_steps", "detect_anomaly", "log_every_n_steps", "inference_mode")  # fmt: skip


def cpu_refusal(trainer_class: type[Trainer], strategy: object, ranks: int) -> str:
    """Returns what Lightning says of the strategy on CPUs, or what DDP does in its place."""
    try:
        if isinstance(strategy, dict):
            module, _, name = str(strategy["class_path"]).rpartition(".")
            module = module or "lightning.pytorch.strategies"
            strategy = getattr(importlib.import_module(module), name)(**(strategy.get("init_args") or {}))
        trainer = trainer_class(accelerator="cpu", devices=ranks, strategy=strategy, logger=False)
        if "DeepSpeed" in type(trainer.strategy).__name__:
            trainer.strategy.setup_environment()
    except Exception as error:  # of whatever kind: its text is shown
        return f'Lightning says "{" ".join(str(error).split())}"'
    return "the ranks hold copies, and the updates are the same"


def adapt_trainer(
    setup: ProofSetup, known: set[str], refusal: Callable[[object], str]
) -> tuple[dict[str, object], list[str]]:
    """Returns the arguments of the Trainer for CPUs and these ranks, and what was changed for it. `refusal` returns why
    a strategy does not run on CPUs.
    """
    stated = as_section(setup.config.get("trainer"))
    arguments = {key: value for key, value in stated.items() if key in known and key not in _LEFT_OUT}
    changes = [f"trainer.{key} is no argument of this Trainer" for key in stated if key not in known]
    precision = str(arguments.pop("precision", None) or "32")
    if precision.startswith(_PRECISIONS):
        changes.append(f"precision {precision} -> 32: both train in fp32")
    strategy = arguments.pop("strategy", None)
    name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
    if isinstance(strategy, dict) and strategy.get("init_args"):
        changes.append("strategy.init_args are off")
    if name not in (None, "auto") and "ddp" not in str(name).lower():
        changes.append(f"strategy {name} -> ddp: {refusal(strategy)}")
    if str(arguments.pop("accelerator", "cpu")) not in ("cpu", "auto"):
        changes.append("accelerator -> cpu")
    arguments.update(
        accelerator="cpu",
        devices=setup.ranks,
        strategy="ddp" if setup.ranks > 1 else "auto",
        accumulate_grad_batches=setup.accumulation,
        max_steps=setup.steps,
        max_epochs=-1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return arguments, changes


def make_object(section: Mapping[str, object], default_module: str, first: object) -> object:
    """Makes the object of `class_path` and `init_args`, with a default module as in a `LightningCLI`."""
    module, _, name = str(section["class_path"]).rpartition(".")
    kind: Callable[..., object] = getattr(importlib.import_module(module or default_module), name)
    return kind(first, **as_section(section.get("init_args")))


def main(folder: str) -> None:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    try:
        import lightning
    except ImportError:
        import pytorch_lightning as lightning

    from dslc.runtime.loop.plain_loop import plain_optimizer

    setup = read_setup(folder)
    job, place = load_program(folder)
    known = set(inspect.signature(lightning.Trainer.__init__).parameters)
    arguments, changes = adapt_trainer(
        setup, known, lambda strategy: cpu_refusal(lightning.Trainer, strategy, setup.ranks)
    )
    curve = Curve(name=f"Lightning {lightning.__version__}", changes=changes)

    class RecordedModule(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = load_network(job)
            self.losses: list[torch.Tensor] = []
            self.norm, self.rate = 0.0, 0.0

        def training_step(self, batch: tuple[torch.Tensor, ...], number: int) -> torch.Tensor:
            loss: torch.Tensor = self.network(*batch)
            self.losses.append(loss.detach())
            return loss

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            self.norm = float(torch.nn.utils.get_total_norm(gradients))
            self.rate = float(optimizer.param_groups[0]["lr"])

        def on_train_batch_end(self, *_: object) -> None:
            if len(self.losses) == setup.accumulation:
                curve.add(mean_over_ranks(torch.stack(self.losses).mean()), self.norm, self.rate)
                self.losses.clear()

        def configure_optimizers(self) -> object:
            section = setup.config.get("optimizer")
            if not isinstance(section, dict) or "class_path" not in section:
                return plain_optimizer(job.optimizer, self)
            optimizer = make_object(section, "torch.optim", self.parameters())
            schedule = setup.config.get("lr_scheduler")
            if not isinstance(schedule, dict) or "class_path" not in schedule:
                return optimizer
            if "ReduceLROnPlateau" in schedule["class_path"]:
                curve.changes.append("lr_scheduler ReduceLROnPlateau is off: a proof evaluates nothing")
                return optimizer
            return [optimizer], [make_object(schedule, "torch.optim.lr_scheduler", optimizer)]

    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    trainer = lightning.Trainer(default_root_dir=os.path.join(folder, "lightning"), **arguments)
    rank = int(os.environ.get("RANK", 0))
    # Lightning's own sampler shuffles.
    sampler: DistributedSampler[object] = DistributedSampler(samples, setup.ranks, rank, shuffle=False)
    trainer.fit(RecordedModule(), DataLoader(samples, batch_size=setup.micro, sampler=sampler))
    leave_curve(folder, curve)
