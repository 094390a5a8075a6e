"""Finds the tool that a configuration file belongs to, by keys that only this tool has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dslc.conversion.config_file import ConfigFile
from dslc.dsl.diagnostics import Report

TOOLS = {
    "deepspeed": "DeepSpeed",
    "transformers": "Transformers",
    "accelerate": "Accelerate",
    "axolotl": "Axolotl",
    "lightning": "Lightning",
    "torchtitan": "torchtitan",
}


@dataclass(frozen=True)
class UnsupportedTool:
    """A tool whose files are recognised and refused. `keys` are names that its files have, some of them or all."""

    name: str
    keys: tuple[str, ...]
    needed: int
    reason: str


_UNSUPPORTED = (
    UnsupportedTool(
        "GPT-NeoX",
        ("pipe_parallel_size", "model_parallel_size", "train_iters", "pos_emb", "norm", "data_path", "vocab_file",
         "tokenizer_type", "num_layers", "hidden_size", "lr_decay_iters", "checkpoint_factor", "eval_interval"),
        3,
        "its network is its own: describe it as `gpt(…)` or `llama(…)`, and the split as `parallelism { … }`",
    ),
    UnsupportedTool(
        "Megatron-LM",
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "MODEL_ARGS", "TEST_TYPE", "train_iters",
         "micro_batch_size", "global_batch_size"),
        2,
        "its network is its own: describe it as `gpt(…)` or `llama(…)`, and the split as `parallelism { … }`",
    ),
    UnsupportedTool(
        "torchtune",
        ("tokenizer", "checkpointer", "dataset", "loss", "optimizer", "max_steps_per_epoch", "metric_logger"),
        5,
        "its components are Python classes: name your network and data in a job, and its `optimizer` and batch there",
    ),
    UnsupportedTool(
        "MMEngine",
        ("_base_", "train_dataloader", "optim_wrapper", "train_cfg", "val_evaluator", "default_hooks"),
        3,
        "its components are Python classes: name your network and data in a job",
    ),
)  # fmt: skip


def _normal(root: Mapping[str, object]) -> set[str]:
    return {key.replace("-", "_") for key in root}


def _is_nemo(file: ConfigFile) -> bool:
    model = file.value("model")
    keys = _normal(model) if isinstance(model, dict) else set()
    return bool({"micro_batch_size", "tensor_model_parallel_size", "train_ds"} & keys) or "exp_manager" in file.root


def _is_deepspeed(file: ConfigFile) -> bool:
    return bool(
        {"train_micro_batch_size_per_gpu", "zero_optimization", "zero_allow_untested_optimizer", "gradient_clipping"}
        & file.root.keys()
    ) or ("train_batch_size" in file.root and "model" not in file.root)


def _is_lightning(file: ConfigFile) -> bool:
    trainer = file.value("trainer")
    return isinstance(trainer, dict) and bool(
        {"max_epochs", "max_steps", "accelerator", "devices", "precision", "accumulate_grad_batches", "gpus"}
        & trainer.keys()
    )


def _is_torchtitan(file: ConfigFile) -> bool:
    training = file.value("training")
    return isinstance(training, dict) and bool(
        {"seq_len", "local_batch_size", "data_parallel_shard_degree", "tensor_parallel_degree"} & training.keys()
    )


def _is_transformers(file: ConfigFile) -> bool:
    keys = file.root.keys()
    return "per_device_train_batch_size" in keys or (
        len(
            {"num_train_epochs", "learning_rate", "output_dir", "lr_scheduler_type", "logging_steps", "save_steps"}
            & keys
        )
        >= 3
        and "base_model" not in keys
    )


_SIGNS: dict[str, Callable[[ConfigFile], bool]] = {
    "accelerate": lambda file: bool({"distributed_type", "compute_environment"} & file.root.keys()),
    "axolotl": lambda file: "base_model" in file.root and bool({"micro_batch_size", "datasets"} & file.root.keys()),
    "torchtitan": _is_torchtitan,
    "lightning": _is_lightning,
    "deepspeed": _is_deepspeed,
    "transformers": _is_transformers,
}


def recognize_tool(file: ConfigFile, report: Report) -> str | None:
    """Returns the tool of the file, a key of `TOOLS`; None if it is refused, with the reason in the report."""
    keys = _normal(file.root)
    for other in _UNSUPPORTED:
        if sum(key in keys for key in other.keys) >= other.needed and not keys & {"compute_environment", "base_model"}:
            _refuse(file, other.name, other.reason, report)
            return None
    if _is_nemo(file):
        reason = "its network is its own: describe it as `gpt(…)` or `llama(…)`, and the split as `parallelism { … }`"
        _refuse(file, "NeMo", reason, report)
        return None
    for tool, has_signs in _SIGNS.items():
        if has_signs(file):
            return tool
    report.add(
        "E1102",
        f"{file.path} belongs to no tool that dslc knows: its keys are {_key_list(file)}",
        None,
        help=f"`--from` names the tool: {', '.join(TOOLS)}",
    )
    return None


def _key_list(file: ConfigFile) -> str:
    keys = [f"`{key[:40]}`" for key in list(file.root)[:5]]
    return ", ".join(keys) + (", …" if len(file.root) > 5 else "") if keys else "none"


def _refuse(file: ConfigFile, name: str, reason: str, report: Report) -> None:
    report.add("E1102", f"{file.path} is a configuration of {name}, which dslc does not convert", None, help=reason)
