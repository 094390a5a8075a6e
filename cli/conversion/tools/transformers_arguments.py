"""Carries the arguments of Hugging Face's Trainer, TRL and LLaMA-Factory into a job."""

from __future__ import annotations

import math
from dataclasses import replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.conversion.key_table import key_table
from dslc.conversion.logger_keys import put_logger
from dslc.conversion.tools.data_sources import read_image_data, set_text_source
from dslc.conversion.tools.pair_arguments import read_pairs
from dslc.conversion.tools.trainer_settings import (
    QUANTIZED_LOADS,
    excludes_offload,
    read_length,
    read_lora,
    read_model,
    read_optimizer,
    read_precision,
    read_quantization,
    read_schedule,
    set_token_source,
)
from dslc.dsl.json_value import Json

NAME = "Transformers"
_LOGGERS = {
    "wandb": {"name": "run_name", "project": "wandb_project", "entity": "wandb_entity", "group": "wandb_run_group"},
    "mlflow": {"name": "run_name"},
    "trackio": {"name": "run_name", "project": "project", "space": "trackio_space_id"},
}
_SCRIPT = "it belongs to the script, and is no argument of the Trainer"
_DEFAULTS: dict[str, Json] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "fp16": False,
    "bf16": False,
}
_LENGTHS = ("max_seq_length", "max_length", "cutoff_len", "block_size", "max_seq_len", "model_max_length")
_LORA = {"rank": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target"}
_TRL_LORA = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules"}


def read_transformers(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the values that resolve `auto` in a DeepSpeed configuration."""
    reader = KeyReader(NAME, file, draft, key_table("transformers"), script=_SCRIPT)
    _read_batch(reader)
    _read_model_and_data(reader)
    read_precision(reader)
    read_length(reader, "max_steps", "num_train_epochs" if not reader.has("num_epochs") else "num_epochs", 3)
    read_optimizer(reader, "optim", "adamw_torch")
    if draft.optimizer and "lr" not in draft.optimizer.arguments:
        draft.optimizer = draft.optimizer.having(lr="5e-5")
        reader.defaults.append("`learning_rate = 5e-5`")
    read_schedule(reader, "lr_scheduler_type", "linear")
    _read_clip(reader)
    _read_times(reader)
    _read_memory(reader)
    _read_rest(reader)
    _note_arguments(reader)
    reader.finish()


def _read_batch(reader: KeyReader) -> None:
    micro = reader.whole_number("per_device_train_batch_size") or reader.whole_number("per_gpu_train_batch_size")
    if micro is None:
        micro = 8
        reader.defaults.append("`per_device_train_batch_size = 8`")
    accumulation = reader.whole_number("gradient_accumulation_steps") or 1
    reader.draft.batch = replace(reader.draft.batch, micro=micro, accumulation=accumulation)
    for key in ("per_device_train_batch_size", "per_gpu_train_batch_size"):
        reader.carry(key, "data.batch: the global batch is micro-batch x accumulation x ranks")
    reader.carry("gradient_accumulation_steps", f"parallelism.microbatches = {accumulation}")
    keep = reader.flag("dataloader_drop_last")
    if keep is None:
        reader.default("data.last_batch", "keep", "dataloader_drop_last = false")
    else:
        reader.put("dataloader_drop_last", "data.last_batch", "drop" if keep else "keep")
    reader.put_number("dataloader_num_workers", "data.workers", least=0)


def _read_model_and_data(reader: KeyReader) -> None:
    read_model(reader, "model_name_or_path")
    length = next((key for key in _LENGTHS if reader.has(key)), None)
    if length is not None or reader.has("model_name_or_path"):
        set_token_source(reader, length or _LENGTHS[0])
    text = reader.text("train_file")
    has_pairs = read_pairs(reader, length)
    if not has_pairs:
        if text and text.endswith(".txt"):
            set_text_source(reader, "train_file", [text])
        read_image_data(reader)
    for key in _LENGTHS:
        if key != length:
            reader.imply(key, f"`{length}` is the length")
    kind = reader.text("finetuning_type")
    if kind == "lora" or (kind is None and (reader.flag("use_peft") or reader.flag("use_lora"))):
        keys = _LORA if kind == "lora" or reader.has("lora_rank") else _TRL_LORA
        read_lora(reader, keys)
        _read_quantization(reader)
        for key in ("finetuning_type", "use_peft", "use_lora"):
            reader.carry(key, "model.adapter = lora(…)")
    elif kind == "full" or kind is None:
        for key in ("finetuning_type", "use_peft", "use_lora"):
            reader.imply(key, "all parameters train, as by default")
        for key in (*_LORA.values(), *_TRL_LORA.values()):
            reader.imply(key, "without `use_peft` there is no adapter")
        _name_quantization(reader)
    else:
        _name_quantization(reader)
        reader.name("finetuning_type", "adapters are `model.adapter = lora(…)`, and frozen parts `model.freeze`")
    if not has_pairs:
        _read_loss(reader)
    share = reader.number("val_size") if reader.has("val_size") else reader.number("validation_split_percentage")
    key = "val_size" if reader.has("val_size") else "validation_split_percentage"
    if share and share < 1:
        reader.put(key, "data.validation", f"{value_text(round(share * 100, 8))}%")
    elif share and key == "validation_split_percentage" and share < 100:
        reader.put(key, "data.validation", f"{value_text(share)}%")
    else:
        reader.name(key, "`data.validation` is a share of the data")


def _read_quantization(reader: KeyReader) -> None:
    """Reads the bits of frozen weights: `quantization_bit` of LLaMA-Factory, `load_in_…` of TRL."""
    bits = reader.whole_number("quantization_bit")
    kinds = {"quantization_bit": {4: "nf4", 8: "int8"}[bits]} if bits in (4, 8) else {}
    read_quantization(reader, kinds)
    if "quantization_bit" not in kinds:
        reader.name("quantization_bit", "`quantize` is nf4, of 4 bits, or int8")


def _read_loss(reader: KeyReader) -> None:
    """Reads label smoothing, and Liger's kernels, which compute the head and the loss without whole logits."""
    smoothing = reader.number("label_smoothing_factor")
    arguments: list[str] = []
    kernels = [key for key in ("use_liger_kernel", "enable_liger_kernel") if reader.flag(key)]
    if kernels:
        arguments.append("chunks = auto")
    if smoothing and smoothing < 1:
        arguments.append(f"label_smoothing = {value_text(smoothing)}")
        reader.put("label_smoothing_factor", "model.loss", f"cross_entropy({', '.join(arguments)})")
    else:
        reader.imply("label_smoothing_factor", "0 is the default")
    for key in kernels:
        reader.put(key, "model.loss", f"cross_entropy({', '.join(arguments)})")
    for key in ("use_liger_kernel", "enable_liger_kernel"):
        if key not in kernels:
            reader.imply(key, "the loss takes whole logits, as by default")


def _name_quantization(reader: KeyReader) -> None:
    """Reports weights in few bits without an adapter."""
    for key in ("quantization_bit", *QUANTIZED_LOADS):
        if reader.value(key):
            reader.name(key, "weights in 4 or 8 bits do not train: `quantize` needs `adapter = lora(…)`")
        else:
            reader.imply(key, "nothing is quantized, as by default")


def _read_clip(reader: KeyReader) -> None:
    norm = reader.number("max_grad_norm")
    if norm:
        reader.put("max_grad_norm", "train.clip", value_text(float(norm)))
    elif norm is None and not reader.has("max_grad_norm"):
        reader.default("train.clip", "1.0", "max_grad_norm = 1.0")
    else:
        reader.imply("max_grad_norm", "0 clips nothing, as by default")


def _read_times(reader: KeyReader) -> None:
    """Reads how often it logs, evaluates and saves."""
    every = reader.number("logging_steps")
    if every and every >= 1:
        reader.put("logging_steps", "log.every", quantity(every, "step"))
    else:
        reader.name("logging_steps", "`log.every` is in steps or epochs, 10 steps by default")
    validates = "data.validation" in reader.draft.settings
    evaluation = "evaluation_strategy" if reader.has("evaluation_strategy") else "eval_strategy"
    for strategy_key, steps_key, setting, reason in (
        (evaluation, "eval_steps", "evaluate.every", "`evaluate.every`, once `data.validation` holds samples out"),
        ("save_strategy", "save_steps", "checkpoint.every", "`checkpoint.every` is in steps, epochs or time"),
    ):
        strategy = (reader.text(strategy_key) or ("no" if setting == "evaluate.every" else "steps")).lower()
        steps = reader.number(steps_key)
        if setting == "evaluate.every" and steps and not reader.has(strategy_key):
            strategy = "steps"
        if strategy in ("no", "false"):
            reader.imply(strategy_key, "it never does, as by default")
            reader.imply(steps_key, f"`{strategy_key}` is `no`")
        elif setting == "evaluate.every" and not validates:
            reader.name(strategy_key, reason)
            reader.name(steps_key, reason)
        elif strategy == "epoch":
            reader.put(strategy_key, setting, "1 epoch")
            reader.imply(steps_key, f"`{strategy_key}` is `epoch`")
        elif steps and steps >= 1:
            reader.draft.set(setting, quantity(steps, "step"), steps_key)
            reader.carry(steps_key, f"{setting} = {quantity(steps, 'step')}")
            reader.carry(strategy_key, f"{setting}, in steps")
        elif strategy == "steps" and not reader.has(steps_key) and setting == "checkpoint.every":
            reader.default(setting, "500 steps", "save_steps = 500")
            reader.carry(strategy_key, f"{setting}, in steps")
        else:
            reader.name(strategy_key, reason)
            reader.name(steps_key, reason)
    keep = reader.whole_number("save_total_limit", least=0)
    if keep:
        reader.put("save_total_limit", "checkpoint.keep", str(keep))
    else:
        reader.name("save_total_limit", "`checkpoint.keep` is at least 1, and 2 by default")


_SHARDING = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2}


def _read_memory(reader: KeyReader) -> None:
    reader.put_switch("gradient_checkpointing", "memory.recompute", "full", "nothing is recomputed, as by default")
    stated = reader.value("fsdp")
    words = " ".join(map(str, stated)) if isinstance(stated, list) else str(stated or "")
    stage = next((_SHARDING[word] for word in words.split() if word in _SHARDING), None)
    if stage is not None:
        reader.put("fsdp", "parallelism.zero", str(stage))
        if "offload" in words and not excludes_offload(reader, "fsdp"):
            reader.draft.set("memory.offload", "[optimizer, parameters]", "fsdp: offload")
        if "hybrid" in words:
            reader.name("fsdp", "`parallelism.replicas` is the number of copies: nodes, for FSDP")
    elif words in ("", "False"):
        reader.imply("fsdp", "nothing is sharded, as by default")
    else:
        reader.name("fsdp", "`parallelism.zero` is 2 or 3 for FSDP")
    reader.imply("fsdp_config", "what is wrapped and gathered when follows from the plan")
    reader.imply("fsdp_transformer_layer_cls_to_wrap", "what is wrapped follows from the plan")
    reader.imply("fsdp_min_num_params", "what is wrapped follows from the plan")


def _read_rest(reader: KeyReader) -> None:
    seed = reader.whole_number("seed", least=0)
    if seed is None:
        reader.default("train.seed", "42", "seed = 42")
    else:
        reader.put("seed", "train.seed", str(seed))
    if reader.flag("full_determinism"):
        reader.put("full_determinism", "train.deterministic", "true")
    if reader.flag("torch_compile"):
        reader.put("torch_compile", "train.compile", "true")
    for key in ("torch_compile", "full_determinism"):
        if reader.flag(key) is False:
            reader.imply(key, "false is the default")
    seconds = reader.whole_number("ddp_timeout")
    if seconds:
        reader.put("ddp_timeout", "launch.timeout", f"{min(seconds, 10**9)} s")
    reports = reader.value("report_to")
    words = [str(word) for word in reports] if isinstance(reports, list) else [str(reports)] if reports else []
    _read_loggers(reader, words)
    reader.carry("deepspeed", "the settings of that file")
    steps = reader.value("checkpointing_steps")
    if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
        reader.put("checkpointing_steps", "checkpoint.every", quantity(steps, "step"))
    elif steps == "epoch":
        reader.put("checkpointing_steps", "checkpoint.every", "1 epoch")
    keep = reader.whole_number("keep_last_n_checkpoints", least=-1)
    if keep and keep > 0:
        reader.put("keep_last_n_checkpoints", "checkpoint.keep", str(keep))


def _read_loggers(reader: KeyReader, words: list[str]) -> None:
    """Carries `report_to`, and the names of projects and runs."""
    libraries = [word for word in words if word in _LOGGERS]
    for word in libraries:
        put_logger(reader, word, ("report_to",), _LOGGERS[word])
    if any(word in ("tensorboard", "all") for word in words):
        reader.put("report_to", "log.tensorboard", "true")
    elif words and all(word in ("none", "None") for word in words):
        reader.put("report_to", "log.tensorboard", "false")
    elif not libraries:
        reader.name("report_to", "no logger of a job is like it: `log.loggers = python(…)` takes one of yours")


def _note_arguments(reader: KeyReader) -> None:
    """Keeps the values that the Trainer puts into a DeepSpeed configuration."""
    values = dict(_DEFAULTS)
    for key, default in _DEFAULTS.items():
        value = reader.flag(key) if isinstance(default, bool) else reader.number(key)
        if value is not None:
            values[key] = value
    ratio, warmup = reader.number("warmup_ratio"), reader.number("warmup_steps") or 0
    if 0 < warmup < 1:  # transformers 5: a share of the training
        ratio, values["warmup_steps"] = warmup, 0
    steps = reader.whole_number("max_steps", least=-1)
    if steps and steps > 0:
        values["max_steps"] = steps
    if ratio and ratio < 1 and not values["warmup_steps"]:
        if steps and steps > 0:
            values["warmup_steps"] = math.ceil(steps * ratio)
        else:  # of a length that only the data shows
            del values["warmup_steps"]
            values["warmup_ratio"] = ratio
    reader.draft.arguments.update(values)
