"""Trains with DeepSpeed as its users do: `deepspeed.initialize` with the JSON, `engine(…)`, `backward`, `step`."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

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
    rank_batches,
    read_setup,
)

_PRECISIONS = ("fp16", "bf16", "bfloat16", "amp", "torch_autocast")
_AXES = ("tensor_parallel", "sequence_parallel_size", "pipeline")
_MONITORS = ("wandb", "comet", "tensorboard", "csv_monitor", "flops_profiler", "autotuning", "elasticity", "aio")
_CUDA_ZERO = ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights")
_OF_THE_MODEL = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def adapt_config(setup: ProofSetup) -> tuple[dict[str, object], list[str]]:
    """Returns the configuration for CPUs and these ranks without any `auto`, and what was changed for it."""
    config, changes = _adapt(setup.config, setup)
    _resolve_autos(config, setup)
    return config, changes


def adapt_engine(setup: ProofSetup) -> tuple[dict[str, object], list[str]]:
    """Returns the configuration of DeepSpeed beside a tool's, which resolves each `auto`, and what was changed."""
    config, changes = _adapt(setup.engine, setup)
    zero = as_section(config.get("zero_optimization"))
    for key in _OF_THE_MODEL:  # the tool takes these from the model's configuration, which this network does not have
        if zero.get(key) == "auto":
            del zero[key]
    return config, changes


def _adapt(stated: Mapping[str, object], setup: ProofSetup) -> tuple[dict[str, object], list[str]]:
    config: dict[str, object]
    config, changes = copy.deepcopy(dict(stated)), []
    for key in _PRECISIONS:
        section = config.pop(key, None)
        if isinstance(section, dict) and section.get("enabled") not in (None, False, "auto"):
            changes.append(f"{key} -> fp32: rounding to 16 bits would hide differences")
    for key in (*_AXES, *_MONITORS, "compression_training", "communication_data_type", "data_types"):
        if config.pop(key, None) is not None and key in _AXES:
            changes.append(f"{key} is off: the ranks share the samples out")
    zero = config.get("zero_optimization")
    if isinstance(zero, dict):
        for key in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"):
            moved = zero.pop(key, None)
            if moved is True or (isinstance(moved, dict) and moved.get("device", "none") != "none"):
                changes.append(f"zero_optimization.{key} is off: all memory is the host's here")
        for key in _CUDA_ZERO:
            if zero.pop(key, None):
                changes.append(f"zero_optimization.{key} is off: its kernels are for GPUs")
        if zero.get("mics_shard_size", -1) not in (-1, None):
            changes.append(f"zero_optimization.mics_shard_size {zero.pop('mics_shard_size')} -> all ranks")
        zero.pop("zero_hpz_partition_size", None)
    sizes = {
        "train_batch_size": setup.batch,
        "train_micro_batch_size_per_gpu": setup.micro,
        "gradient_accumulation_steps": setup.accumulation,
    }
    config.update(sizes)
    config["steps_per_print"] = 10**9
    return config, changes


def _resolve_autos(config: dict[str, object], setup: ProofSetup) -> None:
    """Puts the values of arguments in the place of `auto`, and leaves the rest to DeepSpeed's defaults."""
    for path, section, key in [*_auto_keys(config, "")]:
        if path in setup.autos:
            section[key] = setup.autos[path]
        else:
            del section[key]


def _auto_keys(section: dict[str, object], prefix: str) -> list[tuple[str, dict[str, object], str]]:
    keys = []
    for key, value in section.items():
        if isinstance(value, dict):
            keys += _auto_keys(value, f"{prefix}{key}.")
        elif value == "auto":
            keys.append((f"{prefix}{key}", section, key))
    return keys


def main(folder: str) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch.distributed as dist

    from dslc.runtime.loop.plain_loop import plain_optimizer, plain_scheduler

    setup = read_setup(folder)
    job, place = load_program(folder)
    network = load_network(job)
    config, changes = adapt_config(setup)
    curve = Curve(name=f"DeepSpeed {deepspeed.__version__}", changes=changes)
    deepspeed.init_distributed("gloo")
    own: dict[str, object] = {} if "optimizer" in config else {"optimizer": plain_optimizer(job.optimizer, network)}
    if "scheduler" not in config and job.learning_rate.kind != "constant":  # that of the program, as of the Trainer
        own["lr_scheduler"] = lambda optimizer: plain_scheduler(job.learning_rate, optimizer)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=network, model_parameters=trained, config=config, **own)
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    batches = iter(rank_batches(samples, setup, dist.get_rank()))
    for _ in range(setup.steps):
        total = 0.0
        for _ in range(setup.accumulation):
            loss = engine(*next(batches))
            engine.backward(loss)
            rate = engine.optimizer.param_groups[0]["lr"]
            engine.step()
            total += mean_over_ranks(loss) / setup.accumulation
        norm = engine.get_global_grad_norm()
        curve.add(total, None if norm is None else float(norm), float(rate))
    leave_curve(folder, curve)
