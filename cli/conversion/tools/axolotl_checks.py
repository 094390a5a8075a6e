"""Combinations of settings that Axolotl 0.19 refuses when it reads a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dslc.conversion.key_reader import KeyReader
from dslc.dsl.json_value import Json

Settings = Callable[[str], Json]  # the value of a key, None for a key that the file does not state


@dataclass(frozen=True)
class RefusedCombination:
    """`applies` is true for settings that Axolotl refuses. `key` is the place that is reported."""

    key: str
    reason: str
    help: str
    applies: Callable[[Settings], object]


def _refuses_evaluation(get: Settings) -> bool:
    states = get("eval_strategy") not in (None, "no") or (get("eval_steps") and get("eval_strategy") != "no")
    return get("val_set_size") == 0 and bool(states) and not get("test_datasets")


def _fsdp(get: Settings, key: str) -> Json:
    """Returns a setting of FSDP, whose key may have a prefix."""
    value = get(f"fsdp_config.{key}")
    return get(f"fsdp_config.fsdp_{key}") if value is None else value


def _is_second_fsdp(get: Settings) -> bool:
    return bool(get("fsdp_config")) and str(get("fsdp_version") or _fsdp(get, "version")) == "2"


_ONE = "remove one of them"
_BOTH = "{} and {} exclude each other"
REFUSED = (
    RefusedCombination("base_model", "it states neither `datasets` nor `pretraining_dataset`", "name a data set",
        lambda get: get("datasets") is None and get("pretraining_dataset") is None),
    RefusedCombination("batch_size", _BOTH.format("`batch_size`", "`gradient_accumulation_steps`"), _ONE,
        lambda get: get("batch_size") and get("gradient_accumulation_steps")),
    RefusedCombination("batch_size", "`batch_size` needs `micro_batch_size`", "set `micro_batch_size`",
        lambda get: get("batch_size") and not get("micro_batch_size")),
    RefusedCombination("warmup_steps", _BOTH.format("`warmup_steps`", "`warmup_ratio`"), _ONE,
        lambda get: get("warmup_steps") and get("warmup_ratio")),
    RefusedCombination("warmup_steps", "`warmup_steps` is a whole number", "write `warmup_ratio`",
        lambda get: isinstance(steps := get("warmup_steps"), float) and steps != int(steps)),
    RefusedCombination("save_steps", _BOTH.format("`save_steps`", "`saves_per_epoch`"), _ONE,
        lambda get: get("save_steps") and get("saves_per_epoch")),
    RefusedCombination("eval_steps", _BOTH.format("`eval_steps`", "`evals_per_epoch`"), _ONE,
        lambda get: get("eval_steps") and get("evals_per_epoch")),
    RefusedCombination("save_steps", "`save_steps` needs `save_strategy: steps`", "change `save_strategy`",
        lambda get: get("save_steps") and get("save_strategy") not in (None, "", "steps")),
    RefusedCombination("eval_steps", "`eval_steps` needs `eval_strategy: steps`", "change `eval_strategy`",
        lambda get: get("eval_steps") and get("eval_strategy") not in (None, "", "steps")),
    RefusedCombination("evals_per_epoch", "`evals_per_epoch` needs `eval_strategy: steps`", "change `eval_strategy`",
        lambda get: get("evals_per_epoch") and get("eval_strategy") not in (None, "", "steps")),
    RefusedCombination("val_set_size", "it evaluates no samples", "set `val_set_size`", _refuses_evaluation),
    RefusedCombination("val_set_size", _BOTH.format("`val_set_size`", "`test_datasets`"), "set `val_set_size` to 0",
        lambda get: get("val_set_size") and get("test_datasets")),
    RefusedCombination("save_strategy", "the best model needs `metric_for_best_model`", "name a metric",
        lambda get: get("save_strategy") == "best" and not get("metric_for_best_model")),
    RefusedCombination("early_stopping_patience", "it needs `save_steps` and `eval_steps`", "set both",
        lambda get: get("early_stopping_patience")
        and not (get("save_steps") and get("eval_steps"))),
    RefusedCombination("load_in_4bit", "quantized weights do not train without an adapter", "set `adapter: qlora`",
        lambda get: not get("adapter") and (get("load_in_4bit") or get("load_in_8bit"))),
    RefusedCombination("adapter", "qlora loads weights in 4 bits", "set `load_in_4bit: true`, and not `load_in_8bit`",
        lambda get: get("adapter") == "qlora" and (not get("load_in_4bit") or get("load_in_8bit"))),
    RefusedCombination("lora_dropout", "`lora_target_parameters` takes no dropout", "set `lora_dropout: 0`",
        lambda get: get("lora_target_parameters") and get("lora_dropout")),
    RefusedCombination("deepspeed", _BOTH.format("`deepspeed`", "`fsdp`"), _ONE,
        lambda get: get("deepspeed") and (get("fsdp") or get("fsdp_config"))),
    RefusedCombination("optimizer", "FSDP 2 has no bitsandbytes optimizer", "write `adamw_torch_8bit`",
        lambda get: _is_second_fsdp(get) and get("optimizer") in ("adamw_8bit", "adamw_bnb_8bit")),
    RefusedCombination("optimizer", "FSDP 1 does not offload with an 8-bit optimizer", "write `adamw_torch`",
        lambda get: "8bit" in str(get("optimizer")) and _fsdp(get, "offload_params") and not _is_second_fsdp(get)),
    RefusedCombination("fsdp_config", "FSDP 2 cannot load 4-bit weights so", "set `cpu_ram_efficient_loading` to false",
        lambda get: _is_second_fsdp(get) and _fsdp(get, "cpu_ram_efficient_loading") and get("load_in_4bit")),
    RefusedCombination("tokens", "`tokens` is a list", "names of tokens belong to `special_tokens`",
        lambda get: get("tokens") is not None and not isinstance(get("tokens"), list)),
    RefusedCombination("torch_compile", "strided EBFT does not compile with recomputation", "set it to false",
        lambda get: get("ebft.mode") == "strided" and get("torch_compile") is True and get("gradient_checkpointing")),
)  # fmt: skip


def check_combinations(reader: KeyReader) -> None:
    """Reports the combinations of the file that Axolotl refuses."""
    for combination in REFUSED:
        if combination.applies(reader.file.value):
            message = f"{reader.tool} refuses the file: {combination.reason}"
            reader.warn_ignored(combination.key, message, combination.help)
    if "output_dir" in reader.file.root and not reader.has("output_dir"):
        reader.warn_ignored("output_dir", f"{reader.tool} refuses an empty `output_dir`", "name a folder")
