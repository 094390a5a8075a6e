"""Carries an Axolotl configuration into a job, as far as it trains on next tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.conversion.key_table import key_table
from dslc.conversion.logger_keys import put_logger
from dslc.conversion.tools.data_sources import job_path, read_text_data
from dslc.conversion.tools.pair_arguments import LEAST_BETA, note_cross_entropy
from dslc.conversion.tools.trainer_settings import (
    QUANTIZED_LOADS,
    excludes_offload,
    float8_text,
    read_float8_gather,
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
from dslc.dsl.language.registry import AUTO
from dslc.dsl.words import quoted

_PAIR_LOSSES = ("dpo", "ipo", "orpo", "simpo")
_RENAMED = frozenset({"field_messages", "field_chosen", "field_rejected", "message_property_mappings"})
_TYPES = ("chat_template", "sharegpt")  # the second in older versions
_OWN_TEMPLATE = ("tokenizer_default", "tokenizer_default_fallback_chatml")
_PACKING = "`pack = documents` takes one source, and a mixture has several"


def read_conversations(reader: KeyReader, key: str) -> bool:
    """Sets the source if all data sets hold conversations. Returns False if they do not."""
    value = reader.file.value(key)
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    model = reader.draft.settings.get("model.weights")
    if not entries or not all(entry.get("type") in _TYPES and entry.get("path") for entry in entries) or not model:
        return False
    arguments = f"tokenizer = {model.text}"
    if template := _template(reader):
        arguments += f", template = {template}"
    if reader.flag("train_on_inputs"):
        arguments += ", train_on = all"
        reader.carry("train_on_inputs", "data.source.train_on = all")
    else:
        reader.imply("train_on_inputs", "`train_on = assistant` is the default")
    length = reader.whole_number("sequence_len", least=2) or 512  # Axolotl's default
    arguments += f", max_length = {length}"
    packs = reader.flag("sample_packing") and len(entries) == 1
    if packs:
        arguments += ", pack = documents"
    sources = [f"chat({_conversations(entry)}, {arguments})" for entry in entries]
    text = sources[0] if len(sources) == 1 else f"mixture([{', '.join(sources)}])"
    reader.draft.set("data.source", text, key)
    reader.carry(key, "data.source = chat(…)")
    reader.carry("sequence_len", f"data.source.max_length = {length}")
    if packs:
        reader.carry("sample_packing", "data.source.pack = documents")
    elif reader.flag("sample_packing"):
        reader.name("sample_packing", _PACKING)
    else:
        reader.imply("sample_packing", "a sequence holds one conversation, as by default")
    return True


def read_pairs(reader: KeyReader, key: str) -> bool:
    """Sets the source and the loss of a training on pairs of answers. Returns False if a job cannot say them."""
    word, value = reader.text("rl"), reader.file.value(key)
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    model = reader.draft.settings.get("model.weights")
    if word not in _PAIR_LOSSES or len(entries) != 1 or model is None:
        return False
    kind, renamed = str(entries[0].get("type") or "chat_template"), _RENAMED & entries[0].keys()
    if not kind.startswith("chat_template") or renamed or not entries[0].get("path"):
        return False
    arguments = {"beta": "orpo_alpha" if word == "orpo" and reader.has("orpo_alpha") else "rl_beta"}
    arguments |= {"gamma": "simpo_gamma"} if word == "simpo" else {}
    least = {"beta": LEAST_BETA, "gamma": 0.0}
    given = {name: reader.number(its_key, least=least[name]) for name, its_key in arguments.items()}
    if given["beta"] is None:
        given["beta"] = 0.1  # TRL's default
    texts = [f"{name} = {number}" for name, number in given.items() if number is not None]
    reader.put("rl", "model.loss", f"{word}({', '.join(texts)})")
    for name, its_key in arguments.items():
        if given[name] is not None and reader.has(its_key):
            reader.carry(its_key, f"model.loss.{name} = {given[name]}")
    if word == "simpo":
        note_cross_entropy(reader, "rl")
    source = f"tokenizer = {model.text}"
    if template := _template(reader):
        source += f", template = {template}"
    length = reader.whole_number("sequence_len", least=2) or 512  # Axolotl's default
    reader.draft.set("data.source", f"preferences({_conversations(entries[0])}, {source}, max_length = {length})", key)
    reader.carry(key, "data.source = preferences(…)")
    reader.carry("sequence_len", f"data.source.max_length = {length}")
    reader.imply("train_on_inputs", "the loss counts the answers alone")
    reader.imply("sample_packing", "a row holds one answer")
    return True


def _template(reader: KeyReader) -> str:
    """Returns the file of the template; "" for the tokenizer's own."""
    name, file = reader.text("chat_template"), reader.text("chat_template_jinja")
    if name == "jinja" and file and "{" not in file:
        reader.carry("chat_template", "data.source.template")
        reader.carry("chat_template_jinja", f"data.source.template = {quoted(job_path(file))}")
        return quoted(job_path(file))
    if name in _OWN_TEMPLATE:
        reader.carry("chat_template", "data.source.template = default: the tokenizer's own")
    else:
        reader.name("chat_template", '`template = "file"` takes a file in Jinja; by default it is the tokenizer\'s own')
    return ""


def _conversations(entry: Mapping[str, Json]) -> str:
    """Returns the files of an entry, or its data set."""
    path, files = str(entry["path"]), entry.get("data_files")
    if path.endswith(".jsonl") and not entry.get("field_messages"):
        return quoted(job_path(path))
    arguments = [quoted(path)]
    if isinstance(files, str) or (isinstance(files, list) and files):
        names = [str(file) for file in (files if isinstance(files, list) else [files])]
        arguments.append(f"data_files = [{', '.join(quoted(name) for name in names)}]")
    for name, field in (("input", "field_messages"), ("split", "split"), ("name", "name")):
        if entry.get(field):
            arguments.append(f"{name} = {quoted(str(entry[field]))}")
    return f"datasets({', '.join(arguments)})"


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


NAME = "Axolotl"
_LORA = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "lora_target_modules",
         "parameters": "lora_target_parameters", "save": "lora_modules_to_save"}  # fmt: skip
_AUTOS: dict[str, tuple[Json, str]] = {"bf16": (True, "GPUs that have it")}
_WANDB = {"project": "wandb_project", "entity": "wandb_entity", "name": "wandb_name"}
_MLFLOW = {"experiment": "mlflow_experiment_name", "uri": "mlflow_tracking_uri", "name": "mlflow_run_name"}
_TRACKIO = {"project": "trackio_project_name", "name": "trackio_run_name", "space": "trackio_space_id"}
_OWN_PLUGINS = "axolotl.integrations."
_OF_LIGER = "liger_fused_linear_cross_entropy"
_ALL_LINEAR = ("*_proj",)


def read_axolotl(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the outcome of each key."""
    table = key_table("axolotl")
    listed = file.value("plugins")
    plugins = [str(plugin) for plugin in listed] if isinstance(listed, list) else []
    foreign = next((plugin for plugin in plugins if not plugin.startswith(_OWN_PLUGINS)), "")
    extension = f"`{foreign}`" if foreign else ""
    reader = KeyReader(NAME, file, draft, table, autos=_AUTOS, extension=extension)
    _check_plugins(reader, plugins)
    check_combinations(reader)
    _read_batch(reader)
    read_model(reader, "base_model")
    set_token_source(reader, "sequence_len")
    data = "pretraining_dataset" if reader.has("pretraining_dataset") else "datasets"
    if not read_pairs(reader, data) and not read_conversations(reader, data):
        read_text_data(reader, data)
    _read_adapter(reader)
    _read_loss(reader, plugins)
    _read_precision(reader)
    read_length(reader, "max_steps", "num_epochs", 1)
    read_optimizer(reader, "optimizer", "adamw_torch_fused")
    read_schedule(reader, "lr_scheduler", "cosine")
    _set_default_warmup(reader)
    _read_floor(reader)
    _read_times(reader)
    _read_split(reader)
    _read_float8_gather(reader)
    _read_rest(reader)
    reader.finish()


def _check_plugins(reader: KeyReader, plugins: list[str]) -> None:
    """Reports the keys of a plugin that the file does not list: Axolotl ignores them."""
    for package, keys in reader.table.plugins.items():
        if any(plugin.startswith(package) for plugin in plugins):
            continue
        for key in sorted(keys & reader.file.root.keys()):
            if reader.has(key):
                help = f"add the plugin to `plugins`, or remove `{key}`"
                reader.warn_ignored(key, f"`{key}`: Axolotl ignores it without the plugin of `{package}`", help)


def _read_loss(reader: KeyReader, plugins: list[str]) -> None:
    """Reads the ways to compute the loss without whole logits; a kernel of a plugin works where it is listed."""
    chunks = reader.whole_number("chunked_cross_entropy_num_chunks") or 8
    for key, value in ((_OF_LIGER, AUTO), ("cut_cross_entropy", AUTO), ("chunked_cross_entropy", chunks)):
        package = next((name for name, keys in reader.table.plugins.items() if key in keys), "")
        if not reader.flag(key):
            reader.imply(key, "the loss takes whole logits, as by default")
        elif any(plugin.startswith(package) for plugin in plugins) or not package:
            reader.put(key, "model.loss", f"cross_entropy(chunks = {value})")
        else:
            reader.name(key, "without its plugin it has no effect")
    if reader.flag("chunked_cross_entropy"):
        reader.carry("chunked_cross_entropy_num_chunks", f"model.loss = cross_entropy(chunks = {chunks})")
    else:
        reader.imply("chunked_cross_entropy_num_chunks", "without `chunked_cross_entropy` it has no effect")


def _read_precision(reader: KeyReader) -> None:
    """Reads `fp16` and `bf16`, which is `auto` by default: GPUs have it."""
    read_precision(reader)
    if reader.flag("fp8") and reader.has("adapter"):
        reader.name("fp8", "products in 8 bits are for weights that train, which those under an adapter do not")
    elif reader.flag("fp8"):
        reader.put("fp8", "train.precision", float8_text("tensorwise", (), reader.draft))
        reader.note_default(
            "fp8",
            "Axolotl leaves the first and the last dense layer in bf16, and a job those that `skip` names",
            'name them: `precision = fp8(skip = ["lm_head"])`',
        )
        return
    else:
        reader.imply("fp8", "`train.precision` names the precision")
    if "bf16" not in reader.file.root and not reader.file.value("fp16"):
        reader.default("train.precision", "bf16", "bf16 = auto")


def _read_batch(reader: KeyReader) -> None:
    micro = reader.whole_number("micro_batch_size") or 1
    accumulation = reader.whole_number("gradient_accumulation_steps") or 1
    if reader.has("batch_size") and not reader.has("gradient_accumulation_steps"):
        message = "Axolotl ignores `batch_size`: `gradient_accumulation_steps` is 1 where it is not stated"
        reader.warn_ignored("batch_size", message, "write `gradient_accumulation_steps`")
    reader.name("batch_size", "the global batch is micro-batch x accumulation x ranks, in `data.batch`")
    reader.draft.batch = replace(reader.draft.batch, micro=micro, accumulation=accumulation)
    reader.carry("micro_batch_size", "data.batch: the global batch is micro-batch x accumulation x ranks")
    reader.carry("gradient_accumulation_steps", f"parallelism.microbatches = {accumulation}")
    share = reader.number("val_set_size")
    if share and share < 1:
        reader.put("val_set_size", "data.validation", f"{value_text(round(share * 100, 8))}%")
    elif share:
        reader.name("val_set_size", "`data.validation` is a share of the data")
    else:
        reader.imply("val_set_size", "nothing is held out, as by default")


def _read_adapter(reader: KeyReader) -> None:
    adapter = (reader.text("adapter") or "").lower()
    if adapter in ("lora", "qlora"):
        stacks_alone = reader.has("lora_target_parameters") and not reader.flag("lora_target_linear")
        read_lora(reader, _LORA, () if stacks_alone else _ALL_LINEAR)
        reader.carry("adapter", "model.adapter = lora(…)")
        read_quantization(reader, {})
        if reader.flag("lora_target_linear"):
            reader.carry("lora_target_linear", f"model.adapter.targets = {value_text(list(_ALL_LINEAR))}")
        return
    reader.name("adapter", "adapters are `model.adapter = lora(…)`")
    for key in QUANTIZED_LOADS:
        if reader.flag(key):
            reader.name(key, "weights in 4 or 8 bits do not train: `quantize` needs `adapter = lora(…)`")
        else:
            reader.imply(key, "nothing is quantized, as by default")
    for key in (*_LORA.values(), "lora_target_linear", "lora_model_dir"):
        reader.imply(key, "without `adapter: lora` it has no effect")


def _set_default_warmup(reader: KeyReader) -> None:
    """Sets the warm-up of a file that states none: 3% of the training, at most 100 steps."""
    schedule, length = reader.draft.schedule, reader.draft.settings.get("train.steps")
    if schedule is None or schedule.word == "constant" or reader.has("warmup_steps") or reader.has("warmup_ratio"):
        return
    steps = min(int(0.03 * int(length.text)), 100) if length else None
    if steps == 0:
        return
    warmup = quantity(max(steps, 2), "step") if steps else "3%"  # Axolotl makes 2 steps of one
    reader.draft.schedule = schedule.having(warmup=warmup, **{"from": "0"})
    reader.defaults.append("`warmup_ratio = 0.03`")


def _read_floor(reader: KeyReader) -> None:
    ratio, schedule = reader.number("cosine_min_lr_ratio"), reader.draft.schedule
    if ratio is not None and ratio <= 1 and schedule and schedule.word == "warmup_cosine":
        reader.draft.schedule = schedule.having(floor=value_text(ratio))
        reader.carry("cosine_min_lr_ratio", f"train.lr_schedule.floor = {value_text(ratio)}")
    else:
        reader.name("cosine_min_lr_ratio", "`warmup_cosine(floor = …)` is the lowest share of the rate")


def _read_times(reader: KeyReader) -> None:
    validates = "data.validation" in reader.draft.settings
    for setting, every, strategy, per_epoch in (
        ("evaluate.every", "eval_steps", "eval_strategy", "evals_per_epoch"),
        ("checkpoint.every", "save_steps", "save_strategy", "saves_per_epoch"),
    ):
        steps, count = reader.number(every), reader.number(per_epoch)
        kind = (reader.text(strategy) or "").lower()
        if setting == "evaluate.every" and not validates:
            for key in (every, strategy, per_epoch):
                reader.name(key, "`evaluate.every`, once `data.validation` holds samples out")
        elif kind == "no":
            for key in (every, strategy, per_epoch):
                reader.imply(key, "it never does, as by default")
        elif steps and steps >= 1:
            reader.draft.set(setting, quantity(steps, "step"), every)
            reader.carry(every, f"{setting} = {quantity(steps, 'step')}")
            reader.carry(strategy, f"{setting}, in steps")
        elif count == 1 or kind == "epoch":
            reader.draft.set(setting, "1 epoch", per_epoch if count == 1 else strategy)
            reader.carry(per_epoch, f"{setting} = 1 epoch")
            reader.carry(strategy, f"{setting} = 1 epoch")
        else:
            for key in (every, strategy, per_epoch):
                reader.name(key, f"`{setting}` is in steps or whole epochs")
    logs = reader.number("logging_steps")
    if logs and logs >= 1:
        reader.put("logging_steps", "log.every", quantity(logs, "step"))
    reader.put_number("save_total_limit", "checkpoint.keep")


_SHARDING = {"SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}


def _read_split(reader: KeyReader) -> None:
    """Reads FSDP, and the axes of several dimensions."""
    strategy = reader.text("fsdp_config.sharding_strategy") or reader.text("fsdp_config.fsdp_sharding_strategy") or ""
    reshard = reader.value("fsdp_config.reshard_after_forward")
    if reader.value("fsdp") or reader.value("fsdp_config") or reader.whole_number("dp_shard_size"):
        stage = _SHARDING.get(strategy.upper(), 2 if reshard is False else 3)
        if stage:
            reader.draft.set("parallelism.zero", str(stage), "fsdp")
        for key in ("fsdp", "fsdp_config.sharding_strategy", "fsdp_config.fsdp_sharding_strategy",
                    "fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward",
                    "dp_shard_size"):  # fmt: skip
            reader.carry(key, f"parallelism.zero = {stage}")
    reader.imply("fsdp", "nothing is sharded, as by default")
    for key in ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"):
        if not reader.flag(key):
            reader.imply(key, "all stays on the device, as by default")
        elif not excludes_offload(reader, key):
            reader.put(key, "memory.offload", "[optimizer, parameters]")
    recompute = reader.value("gradient_checkpointing")
    for key in ("gradient_checkpointing", "fsdp_config.activation_checkpointing",
                "fsdp_config.fsdp_activation_checkpointing"):  # fmt: skip
        if reader.value(key) in (True, "offload", "offload_disk", "true", "unsloth"):
            reader.put(key, "memory.recompute", "full")
        else:
            reader.name(key, "`memory.recompute` is none, full, selective or every(n)")
    if recompute in (False, "false", ""):
        reader.imply("gradient_checkpointing", "nothing is recomputed, as by default")
    for key, axis in (("tensor_parallel_size", "tensor"), ("context_parallel_size", "context"),
                      ("sequence_parallel_degree", "context")):  # fmt: skip
        reader.put_axis(key, axis)
    copies = reader.whole_number("dp_replicate_size")
    if copies and copies > 1 and "parallelism.zero" in reader.draft.settings:
        reader.put("dp_replicate_size", "parallelism.replicas", str(copies))
    else:
        reader.imply("dp_replicate_size", "data ranks without shards are copies")
    shards = reader.whole_number("dp_shard_size")
    if shards:
        reader.draft.batch = replace(reader.draft.batch, ranks=shards * (copies or 1))
    reader.carry("deepspeed", "the settings of that file")


def _read_float8_gather(reader: KeyReader) -> None:
    key = "fp8_enable_fsdp_float8_all_gather"
    if not reader.flag("fp8") or reader.has("adapter"):
        reader.imply(key, "without `fp8` it has no effect")
    elif read_float8_gather(reader, key):
        text = float8_text("tensorwise", (), reader.draft, all_gather=True)
        reader.draft.set("train.precision", text, "fp8")


def _read_rest(reader: KeyReader) -> None:
    norm = reader.number("max_grad_norm")
    if norm:
        reader.put("max_grad_norm", "train.clip", value_text(norm))
    elif norm is None:
        reader.default("train.clip", "1.0", "max_grad_norm = 1.0")
    reader.put_number("seed", "train.seed", least=0)
    reader.put_number("dataloader_num_workers", "data.workers", least=0)
    if reader.value("torch_compile") in (True, "auto", "true"):
        reader.put("torch_compile", "train.compile", "true")
    elif reader.flag("torch_compile") is False:
        reader.imply("torch_compile", "nothing is compiled, as by default")
    seconds = reader.whole_number("ddp_timeout")
    if seconds:
        reader.put("ddp_timeout", "launch.timeout", f"{min(seconds, 10**9)} s")
    half = reader.flag("float16"), reader.flag("bfloat16")
    for key, word, stated in (("float16", "fp16", half[0]), ("bfloat16", "bf16", half[1])):
        if stated:
            reader.name(key, f"weights stay in fp32: `train.precision = {word}` computes in 16 bits")
        else:
            reader.imply(key, "false is the default")
    if reader.text("wandb_project") and reader.text("wandb_mode") != "disabled":
        put_logger(reader, "wandb", ("wandb_project", "use_wandb"), _WANDB)
        if reader.text("wandb_mode") == "offline":
            reader.name("wandb_mode", "`wandb(mode = offline)`, or WANDB_MODE where it runs")
    if reader.flag("use_mlflow") or reader.text("mlflow_experiment_name"):
        put_logger(reader, "mlflow", ("use_mlflow",), _MLFLOW)
    if reader.flag("use_trackio") or reader.text("trackio_project_name"):
        put_logger(reader, "trackio", ("use_trackio",), _TRACKIO)
    if reader.flag("use_tensorboard") is not None:
        reader.put("use_tensorboard", "log.tensorboard", "true" if reader.flag("use_tensorboard") else "false")
