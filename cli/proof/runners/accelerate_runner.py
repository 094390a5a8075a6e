"""Trains with Accelerate as its users do: `accelerate launch --config_file`, and a loop over what it prepares.

The configuration states neither optimizer nor schedule: the loop has those of the job, made of torch's own.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from dslc.proof.runners.proof_files import (
    Curve,
    ProofSetup,
    count_targets,
    leave_curve,
    load_network,
    load_program,
    load_samples,
    mean_over_ranks,
    read_setup,
)

CONFIG = "accelerate.yaml"
_DROPPED = ("fsdp_config", "parallelism_config", "megatron_lm_config", "fp8_config", "tpu_config", "mpirun_config",
            "dynamo_config", "dynamo_backend", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
            "same_network", "rdzv_backend", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16",
            "ipex_config", "command_file", "commands", "main_training_function")  # fmt: skip


def adapt_config(setup: ProofSetup) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration for CPUs and these ranks, and what was changed for it."""
    config, changes = copy.deepcopy(dict(setup.config)), []
    kind = str(config.get("distributed_type", "NO")).upper()
    if config.get("mixed_precision") not in (None, "no", False):
        changes.append(f"mixed_precision {config['mixed_precision']} -> no: both train in fp32")
    for key in _DROPPED:
        config.pop(key, None)
    if kind == "FSDP":
        changes.append("FSDP -> DDP: Accelerate shards on accelerators alone")
    elif kind == "DEEPSPEED":
        changes.append("DEEPSPEED -> DDP: Accelerate starts DeepSpeed on accelerators alone")
    config.pop("deepspeed_config", None)
    config.update(
        compute_environment="LOCAL_MACHINE",
        distributed_type="MULTI_GPU" if setup.ranks > 1 else "NO",  # starts ranks as torchrun does, on CPUs too
        mixed_precision="no",
        use_cpu=False,  # or `accelerate launch` asks for mpirun: ACCELERATE_USE_CPU says it to the ranks
        num_machines=1,
        machine_rank=0,
        num_processes=setup.ranks,
        main_process_port=0,
        rdzv_backend="static",
        same_network=True,
        downcast_bf16="no",
    )
    return config, changes


def write_launch_file(folder: str) -> str:
    """Writes the file for `accelerate launch`, and returns its path."""
    import yaml

    path = os.path.join(folder, CONFIG)
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(adapt_config(read_setup(folder))[0], file)
    return path


def main(folder: str) -> None:
    import accelerate
    import torch
    from torch.utils.data import DataLoader

    from dslc.runtime.loop.plain_loop import plain_optimizer, plain_scheduler

    setup = read_setup(folder)
    job, place = load_program(folder)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=setup.accumulation)
    curve = Curve(name=f"Accelerate {accelerate.__version__}", changes=adapt_config(setup)[1])
    network = load_network(job)
    optimizer = plain_optimizer(job.optimizer, network)
    scheduler = plain_scheduler(job.learning_rate, optimizer)
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    loader: Any = DataLoader(samples, batch_size=setup.micro)
    network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    losses: list[torch.Tensor] = []
    for batch in loader:
        with accelerator.accumulate(network):
            loss = network(*batch)
            losses.append(loss.detach())
            accelerator.backward(loss)
            norm, rate = None, optimizer.param_groups[0]["lr"]
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(network.parameters(), job.clip or float("inf"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            curve.add(mean_over_ranks(torch.stack(losses).mean()), None if norm is None else float(norm), float(rate))
            losses.clear()
    leave_curve(folder, curve)
