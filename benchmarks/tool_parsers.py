"""`python tool_parsers.py TOOL FILE…`: reads files with the parser of a tool, in the interpreter that has the tool.

Prints a JSON object with an entry for each file: the text of a refusal, or the values that the tool resolves. It needs
neither dslc nor a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

GPUS = 8  # which Lightning and Axolotl are told that the machine has
_PRECISIONS = {"16": "fp16", "bf16": "bf16", "32": "fp32", "bfloat16": "bf16", "float32": "fp32"}


def lightning_values() -> Callable[[str], dict[str, Any]]:
    """Returns a function that makes a Trainer of a file's `trainer`, without objects of the user's program."""
    import jsonargparse
    import lightning.fabric.accelerators.cuda as fabric_cuda
    import lightning.pytorch as pl
    import torch
    import yaml
    from lightning.pytorch.accelerators import cuda

    for module in (fabric_cuda, cuda):
        module.num_cuda_devices = lambda: GPUS
    fabric_cuda.is_cuda_available = lambda: True
    fabric_cuda._get_all_visible_cuda_devices = lambda: list(range(GPUS))
    torch.cuda.device_count = lambda: GPUS
    torch.cuda.is_available = lambda: True
    torch.cuda.is_bf16_supported = lambda *_, **__: True

    def values(path: str) -> dict[str, Any]:
        with open(path, encoding="utf-8-sig") as file:
            trainer = dict(yaml.safe_load(file).get("trainer") or {})
        for key in ("callbacks", "logger", "plugins", "profiler"):
            if trainer.get(key) not in (None, True, False):
                del trainer[key]
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(pl.Trainer, "trainer", fail_untyped=False)
        arguments = dict(vars(parser.parse_object({"trainer": trainer}).trainer))
        strategy = arguments.get("strategy")
        if isinstance(strategy, jsonargparse.Namespace):
            module, _, name = strategy.class_path.rpartition(".")
            stated = dict(vars(strategy.get("init_args", jsonargparse.Namespace())))
            arguments["strategy"] = getattr(importlib.import_module(module), name)(**stated)
        made = pl.Trainer(**arguments)
        return {
            "devices": [made.num_nodes, made.num_devices],
            "accumulation": made.accumulate_grad_batches,
            "precision": _PRECISIONS[made.precision.partition("-")[0]],
            "steps": made.max_steps if made.max_steps > 0 else None,
            "epochs": None if made.max_steps > 0 else made.max_epochs,
            "clip": made.gradient_clip_val or 0,
        }

    return values


def torchtitan_values() -> Callable[[str], dict[str, Any]]:
    from torchtitan.config import ConfigManager

    def values(path: str) -> dict[str, Any]:
        config = ConfigManager().parse_args([f"--job.config_file={path}"])
        return {
            "micro": config.training.local_batch_size,
            "lr": config.optimizer.lr,
            "weight_decay": config.optimizer.weight_decay,
            "precision": _PRECISIONS[config.training.mixed_precision_param],
            "steps": config.training.steps,
            "context": config.training.seq_len,
            "clip": config.training.max_norm,
            "seed": config.debug.seed,
        }

    return values


def axolotl_values() -> Callable[[str], dict[str, Any]]:
    import yaml

    sys.modules.setdefault("ring_flash_attn", ModuleType("ring_flash_attn"))  # needs CUDA; only its presence is checked
    from axolotl.utils.config import validate_config
    from axolotl.utils.dict import DictDefault

    machine = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 1, "compute_capability": "sm_90"}

    def values(path: str) -> dict[str, Any]:
        with open(path, encoding="utf-8-sig") as file:
            config = DictDefault(yaml.safe_load(file))
        config.pop("plugins", None)  # they import code of their own
        read = validate_config(config, machine, {"torch_version": "2.13.0"})
        steps = read.max_steps if (read.max_steps or 0) > 0 else None
        bf16 = read.bf16 and read.bf16 != "false"
        return {
            "micro": read.micro_batch_size,
            "accumulation": read.gradient_accumulation_steps or read.batch_size // read.micro_batch_size,
            "lr": float(read.learning_rate),
            "weight_decay": float(read.weight_decay or 0),
            "precision": "bf16" if bf16 else "fp16" if read.fp16 else "fp32",
            "steps": steps,
            "epochs": None if steps else read.num_epochs,
            "context": read.sequence_len,
            "clip": 1.0 if read.max_grad_norm is None else float(read.max_grad_norm),
            "seed": read.seed,
        }

    return values


READERS = {"lightning": lightning_values, "torchtitan": torchtitan_values, "axolotl": axolotl_values}


def main() -> None:
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    results: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        values = READERS[sys.argv[1]]()
        for path in sys.argv[2:]:
            printed.seek(0)
            printed.truncate()
            try:
                results[path] = values(path)
            except (Exception, SystemExit) as error:  # a refusal, of whatever kind: it is shown
                text = printed.getvalue() if isinstance(error, SystemExit) else str(error)
                results[path] = f"{type(error).__name__}: {' '.join(text.split())[:300]}"
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
