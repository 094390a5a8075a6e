"""Makes Accelerate start FSDP or DeepSpeed on CPUs, which its own state does on accelerators alone.

Accelerate and the Trainer of transformers choose the engine by the state of the process. The state is public, and is
made here over gloo before they read it: the engine itself is the tool's own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Why FSDP synchronizes no weights at its start, and each rank loads them.
NO_DEVICES = 'Accelerate says "There are currently no available devices found"'


def start_engine_on_cpus(engine: str) -> None:
    """Makes the state of this process, in which Accelerate starts the engine, `fsdp` or `deepspeed`."""
    os.environ.pop("ACCELERATE_USE_CPU", None)  # with it, Accelerate starts DDP alone
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    if engine == "deepspeed":
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(backend="gloo")
    if engine == "fsdp":
        state.distributed_type = DistributedType.MULTI_GPU


def engine_title(wrapped: object) -> str:
    """Returns the name of what trains the module, by the class that wraps it."""
    titles = {"FullyShardedDataParallel": "FSDP 1", "DeepSpeedEngine": "DeepSpeed", "DistributedDataParallel": "DDP"}
    ancestors = [kind.__name__ for kind in type(wrapped).__mro__]
    if "FSDPModule" in ancestors:
        return "FSDP 2"
    return next((titles[name] for name in ancestors if name in titles), "one process")


def name_blocks(module: Any, network: nn.Module) -> None:
    """Names the classes of the network's blocks on the module, where FSDP finds them."""
    module._no_split_modules = sorted({type(block).__name__ for block in blocks_of(network)})


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a network: the members of its outermost lists of several modules of one class."""
    import torch

    blocks: list[nn.Module] = []
    for part in network.children():
        members = list(part) if isinstance(part, torch.nn.ModuleList | torch.nn.Sequential) else []
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        blocks += members if alike else blocks_of(part)
    return blocks
