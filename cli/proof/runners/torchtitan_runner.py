"""Trains with torchtitan as its users do: its `Trainer` with the TOML, and a registered specification of the model.

The specification has the network of the job. Sharding, optimizer, schedule, loss and the loop are torchtitan's.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dslc.proof.runners.accelerate_state import blocks_of, engine_title
from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    count_targets,
    leave_curve,
    load_network,
    load_program,
    load_samples,
    rank_batches,
    read_setup,
)

if TYPE_CHECKING:
    from torch import nn
    from torchtitan.config import JobConfig

_NAME = "dslc"  # of the specification
# Settings by their sections, each with the value for this machine, and the reason where the updates could differ.
_FIXED: Mapping[str, Mapping[str, tuple[object, str]]] = {
    "training": {
        "dtype": ("float32", "both train in fp32"),
        "mixed_precision_param": ("float32", "both train in fp32"),
        "enable_cpu_offload": (False, "all memory is the host's here"),
    },
    "parallelism": {
        "tensor_parallel_degree": (1, ""),
        "context_parallel_degree": (1, ""),
        "pipeline_parallel_degree": (1, ""),
        "expert_parallel_degree": (1, ""),
        "expert_tensor_parallel_degree": (1, ""),
    },
    "activation_checkpoint": {"mode": ("none", "nothing is recomputed: the updates are the same")},
    "compile": {"enable": (False, "nothing is compiled")},
    "optimizer": {"implementation": ("for-loop", "")},
    "checkpoint": {"enable": (False, "")},
    "validation": {"enable": (False, "")},
    "profiling": {"enable_profiling": (False, ""), "enable_memory_snapshot": (False, "")},
    "experimental": {"custom_import": ("", "")},
    "model": {"converters": ([], "nothing is converted"), "name": (_NAME, ""), "flavor": (_NAME, "")},
}


class CpuDevice:
    """Stands for the module of a device, such as `torch.cuda`, on a CPU: the functions that torchtitan calls."""

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def synchronize() -> None:
        pass


def choose_cpu() -> None:
    """Names the CPU in the modules of torchtitan, which name `cuda` where torch finds no accelerator."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"  # type: ignore[attr-defined]
            module.device_module = CpuDevice  # type: ignore[attr-defined]


def adapt_config(config: JobConfig, setup: ProofSetup) -> list[str]:
    """Changes the configuration for CPUs and these ranks, and returns what was changed for it."""
    changes = ["device cuda -> cpu over gloo: torchtitan takes `cuda` where it finds no accelerator"]
    for section, settings in _FIXED.items():
        part = getattr(config, section)
        for key, (value, reason) in settings.items():
            stated = getattr(part, key)
            if stated != value and reason:
                changes.append(f"{section}.{key} {stated} -> {value}: {reason}")
            setattr(part, key, value)
    parallelism = config.parallelism
    if parallelism.data_parallel_replicate_degree > 1 and parallelism.data_parallel_shard_degree == 1:
        parallelism.data_parallel_replicate_degree = setup.ranks
    else:
        parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = 1, -1
    config.training.local_batch_size = setup.micro
    config.training.global_batch_size = setup.batch
    config.training.steps = setup.length
    return changes


def make_model_class(full: nn.Module) -> type:
    """Returns the class of the model: the network, with the names by which torchtitan shards a model."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.protocols.model import ModelProtocol

    class TitanModel(ModelProtocol):  # type: ignore[misc]
        def __init__(self, arguments: object) -> None:
            super().__init__(arguments)
            self.network = copy.deepcopy(full)
            self.model_args = arguments
            self.tok_embeddings = self.norm = self.output = None
            self._blocks = {str(number): block for number, block in enumerate(blocks_of(self.network))}

        @property
        def layers(self) -> dict[str, nn.Module]:
            return self._blocks

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.network(input)
            return output

        def init_weights(self, buffer_device: object = None) -> None:
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(self.network, full.state_dict(), options=options)
            for name, buffer in self.network.named_buffers():
                buffer.copy_(full.get_buffer(name))

    return TitanModel


def make_recorder(curve: Curve) -> type:
    """Returns the object to which torchtitan reports each step."""

    class CurveProcessor:
        def __init__(self, *_: object, **__: object) -> None:
            from torchtitan.tools.utils import NoColor

            self.color = NoColor()
            self.device_memory_monitor = self
            self.device_name = "cpu"
            self.max_reserved_gib = self.max_reserved_pct = 0.0
            self.data_loading_times: list[float] = []
            self.ntokens_since_last_log = 0

        def get_peak_stats(self) -> object:
            return self

        def should_log(self, step: int) -> bool:
            return True

        def log(self, step: int, average: float, most: float, norm: float, extra_metrics: Mapping[str, float]) -> None:
            curve.add(float(average), float(norm), float(extra_metrics["lr"]))

    return CurveProcessor


def shard_model(model: nn.Module, *arguments: object) -> nn.Module:
    """Shards the model as torchtitan does, and sums gradients without a factor in the reduction, which gloo lacks."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama

    sharded: nn.Module = parallelize_llama(model, *arguments)
    for module in sharded.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return sharded


def make_arguments() -> object:
    """Returns the arguments of the model, from which torchtitan counts parameters and FLOPs."""
    from dataclasses import dataclass

    from torchtitan.protocols.model import BaseModelArgs

    @dataclass
    class TitanArguments(BaseModelArgs):  # type: ignore[misc]
        attn_type: str = "sdpa"

        def update_from_config(self, job_config: object, **_: object) -> None:
            pass

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            return sum(parameter.numel() for parameter in model.parameters()), 0

    return TitanArguments()


def main(folder: str) -> None:
    os.environ["LOCAL_RANK"] = "0"  # the index of a CPU
    from importlib.metadata import version

    import torch
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
    from torchtitan.train import Trainer

    choose_cpu()
    setup = read_setup(folder)
    job, place = load_program(folder)
    if job.loss.kind != "cross_entropy":
        raise ValueError("torchtitan trains language models with cross entropy: --model names a job with another loss")
    config = ConfigManager().parse_args([f"--job.config_file={setup.path}", f"--job.dump_folder={folder}/torchtitan"])
    curve = Curve(name=f"torchtitan {version('torchtitan')}", changes=adapt_config(config, setup))
    network: Any = load_network(job)
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)

    class RankBatches:
        def __init__(self, dp_world_size: int, dp_rank: int, **_: object) -> None:
            self.batches = rank_batches(samples, setup, dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            return (({"input": input}, target) for input, target in self.batches)

    register_train_spec(
        _NAME,
        TrainSpec(
            model_cls=make_model_class(network.network),
            model_args={_NAME: make_arguments()},
            parallelize_fn=shard_model,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=RankBatches,
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
            build_metrics_processor_fn=make_recorder(curve),
        ),
    )
    trainer = Trainer(config)
    curve.name += f", {engine_title(trainer.model_parts[0])}"
    trainer.train()
    leave_curve(folder, curve)
