"""Trains with Accelerate as its users do: `accelerate launch --config_file`, and a loop over what it prepares.

The configuration states neither optimizer nor schedule: the loop has the job's, made of torch's own.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from dslc.proof.runners.accelerate_state import NO_DEVICES, engine_title, name_blocks, start_engine_on_cpus
from dslc.proof.runners.deepspeed_runner import adapt_engine
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

CONFIG = "accelerate.yaml"
_ENGINE_FILE = "deepspeed.json"
_DROPPED = ("parallelism_config", "megatron_lm_config", "fp8_config", "tpu_config", "mpirun_config",
            "dynamo_config", "dynamo_backend", "machine_rank", "main_process_ip", "main_process_port", "gpu_ids",
            "same_network", "rdzv_backend", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "downcast_bf16",
            "ipex_config", "command_file", "commands", "main_training_function")  # fmt: skip
_ENGINES = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed"}
# Settings of FSDP that need an accelerator, each with the value for CPUs and Accelerate's own words.
_FSDP_OFF = {
    "fsdp_offload_params": "all memory is the host's here",
    "fsdp_cpu_ram_efficient_loading": "each rank loads the weights: it needs fsdp_sync_module_states",
    "fsdp_sync_module_states": NO_DEVICES,
    "fsdp_activation_checkpointing": "nothing is recomputed: the updates are the same",
    "fsdp_activation_checkpointing_offload": "",
}

_HYBRID = {"HYBRID_SHARD": "FULL_SHARD", "4": "FULL_SHARD", "HYBRID_SHARD_ZERO2": "SHARD_GRAD_OP", "5": "SHARD_GRAD_OP"}


def engine_of(config: Mapping[str, object], ranks: int) -> str:
    """Returns `fsdp`, `deepspeed`, or the empty string for DDP."""
    return _ENGINES.get(str(config.get("distributed_type", "NO")).upper(), "") if ranks > 1 else ""


def adapt_config(setup: ProofSetup) -> tuple[dict[str, object], list[str]]:
    """Returns the configuration for CPUs and these ranks, and what was changed for it."""
    config, changes = copy.deepcopy(dict(setup.config)), []
    if config.get("mixed_precision") not in (None, "no", False):
        changes.append(f"mixed_precision {config['mixed_precision']} -> no: both train in fp32")
    for key in _DROPPED:
        config.pop(key, None)
    engine = engine_of(config, setup.ranks)
    kind = "MULTI_GPU" if setup.ranks > 1 else "NO"  # starts ranks as torchrun does, on CPUs too
    if engine:
        kind = engine.upper()
        changes.append(f"{kind} over gloo: the state of Accelerate is made on CPUs, where it chooses DDP by itself")
    elif str(config.get("distributed_type")).upper() in _ENGINES:
        changes.append(f"{config['distributed_type']} is off: one rank shards nothing")
    section = config.pop("fsdp_config", None)
    if engine == "fsdp":
        config["fsdp_config"] = _adapt_fsdp(as_section(section), changes)
    section = config.pop("deepspeed_config", None)
    if engine == "deepspeed":
        config["deepspeed_config"] = _adapt_deepspeed(as_section(section), setup, changes)
    config.update(
        compute_environment="LOCAL_MACHINE",
        distributed_type=kind,
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


def _adapt_fsdp(section: Mapping[str, object], changes: list[str]) -> dict[str, object]:
    fsdp = dict(section)
    for key, reason in _FSDP_OFF.items():
        if fsdp.get(key) not in (None, False, "false") and reason:
            changes.append(f"{key} -> false: {reason}")
        fsdp[key] = False
    strategy = str(fsdp.get("fsdp_sharding_strategy") or "")
    if strategy in _HYBRID:
        fsdp["fsdp_sharding_strategy"] = _HYBRID[strategy]
        changes.append(
            f"fsdp_sharding_strategy {strategy} -> {_HYBRID[strategy]}: the ranks hold one copy of the shards"
        )
    layer = fsdp.pop("fsdp_transformer_layer_cls_to_wrap", None)
    if layer:
        changes.append(f"fsdp_transformer_layer_cls_to_wrap {layer} -> the blocks of this network")
    return fsdp


def _adapt_deepspeed(section: Mapping[str, object], setup: ProofSetup, changes: list[str]) -> dict[str, object]:
    if setup.engine:
        changes += adapt_engine(setup)[1]
        return {"deepspeed_config_file": _ENGINE_FILE}
    deepspeed = {key: value for key, value in section.items() if not key.startswith("deepspeed_")}
    for key in [key for key in deepspeed if key.startswith("offload_") and deepspeed[key] not in (None, "none")]:
        changes.append(f"{key} {deepspeed.pop(key)} -> none: all memory is the host's here")
    return {**deepspeed, "gradient_accumulation_steps": setup.accumulation}


def write_launch_file(folder: str) -> str:
    """Writes the file for `accelerate launch`, and returns its path."""
    import yaml

    path, setup = os.path.join(folder, CONFIG), read_setup(folder)
    config = adapt_config(setup)[0]
    section = as_section(config.get("deepspeed_config"))
    if "deepspeed_config_file" in section:
        engine_file = os.path.join(folder, str(section["deepspeed_config_file"]))
        section["deepspeed_config_file"] = engine_file
        with open(engine_file, "w", encoding="utf-8") as file:
            json.dump(adapt_engine(setup)[0], file)
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    return path


def main(folder: str) -> None:
    import accelerate
    import torch
    from torch.utils.data import DataLoader

    from dslc.runtime.loop.plain_loop import plain_optimizer, plain_scheduler

    setup = read_setup(folder)
    job, place = load_program(folder)
    engine = engine_of(setup.config, setup.ranks)
    if engine:
        start_engine_on_cpus(engine)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=setup.accumulation)
    curve = Curve(name=f"Accelerate {accelerate.__version__}", changes=adapt_config(setup)[1])
    network: Any = load_network(job)
    if engine == "fsdp":
        name_blocks(network, network.network)
        if not accelerator.is_fsdp2:  # FSDP 1 replaces the parameters, and the optimizer takes the new ones
            network = accelerator.prepare(network)
    optimizer = plain_optimizer(job.optimizer, network)
    scheduler = plain_scheduler(job.learning_rate, optimizer)
    samples = load_samples(job, place, setup.steps)
    curve.targets = count_targets(samples, setup, job)
    loader = DataLoader(samples, batch_size=setup.micro)
    if engine == "fsdp" and not accelerator.is_fsdp2:
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    else:
        network, optimizer, loader, scheduler = accelerator.prepare(network, optimizer, loader, scheduler)
    curve.name += f", {engine_title(network)}"
    losses: list[torch.Tensor] = []
    for batch in loader:
        with accelerator.accumulate(network):
            loss = network(*batch)
            losses.append(loss.detach())
            norm, rate = None, optimizer.param_groups[0]["lr"]
            accelerator.backward(loss)  # DeepSpeed updates here
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(network.parameters(), job.clip or float("inf"))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            curve.add(mean_over_ranks(torch.stack(losses).mean()), None if norm is None else float(norm), float(rate))
            losses.clear()
    leave_curve(folder, curve)
