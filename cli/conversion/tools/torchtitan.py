"""Carries a torchtitan configuration into a job."""

from __future__ import annotations

from dataclasses import replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import CallDraft, ConvertedSetting, Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.conversion.key_table import key_table
from dslc.conversion.logger_keys import put_logger
from dslc.conversion.tools.trainer_settings import float8_text, read_float8_gather, set_token_source

NAME = "torchtitan"
_EXTENSIONS = ("job.custom_config_module", "experimental.custom_args_module")
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "looped_bfs",
    "interleavedzerobubble": "zero_bubble",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}


def read_torchtitan(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the outcome of each key."""
    modules = (value for key in _EXTENSIONS if isinstance(value := file.value(key), str) and value)
    reader = KeyReader(
        NAME, file, draft, key_table("torchtitan"), extension=next((f"`{name}`" for name in modules), "")
    )
    set_token_source(reader, "training.seq_len", 2048)
    _read_axes(reader, _place_of_axes(file))
    _read_batch(reader)
    _read_training(reader)
    _read_optimizer(reader)
    _read_schedule(reader)
    _read_memory(reader)
    _read_times(reader)
    reader.finish()


def _place_of_axes(file: ConfigFile) -> str:
    """Returns the section of the axes: older versions have them in `training` and `experimental`."""
    return "parallelism" if "parallelism" in file.root else "training"


def _read_axes(reader: KeyReader, section: str) -> None:
    draft = reader.draft
    for name, axis in (("tensor", "tensor"), ("context", "context"), ("pipeline", "pipeline")):
        for key in (f"{section}.{name}_parallel_degree", f"experimental.{name}_parallel_degree"):
            reader.put_axis(key, axis)
    schedules = (f"{section}.pipeline_parallel_schedule", "experimental.pipeline_parallel_schedule")
    for key in schedules:
        schedule = (reader.text(key) or "").lower().replace("_", "")
        if schedule in _SCHEDULES and "pipeline" in draft.axes:
            reader.put(key, "parallelism.schedule", _SCHEDULES[schedule])
        elif "pipeline" in draft.axes:
            reader.name(key, "`parallelism.schedule` names the order of micro-batches")
        else:
            reader.imply(key, "without a pipeline it has no effect")
    experts = reader.whole_number(f"{section}.expert_parallel_degree")
    if experts and experts > 1:
        reader.put(f"{section}.expert_parallel_degree", "parallelism.expert", str(experts))
    else:
        reader.imply(f"{section}.expert_parallel_degree", "`parallelism.expert` is 1 by default")
    shards = reader.whole_number(f"{section}.data_parallel_shard_degree", least=-1)
    if shards == 0:
        reader.warn_refused(f"{section}.data_parallel_shard_degree", "-1, or the number of shards")
    shards = shards or -1
    copies = reader.whole_number(f"{section}.data_parallel_replicate_degree") or 1
    if shards != 1:
        draft.set("parallelism.zero", "3", "data_parallel_shard_degree")
    if copies > 1 and shards != 1:
        draft.set("parallelism.replicas", str(copies), "data_parallel_replicate_degree")
    if shards > 0:
        draft.batch = replace(draft.batch, ranks=shards * copies)
    reader.carry(f"{section}.data_parallel_shard_degree", f"parallelism.zero = {3 if shards != 1 else 0}")
    reader.carry(f"{section}.data_parallel_replicate_degree", f"parallelism.replicas = {copies}")


def _read_batch(reader: KeyReader) -> None:
    key = "training.local_batch_size" if reader.has("training.local_batch_size") else "training.batch_size"
    micro = reader.whole_number(key)
    if micro is None and not reader.has(key):
        micro = 8
        reader.defaults.append("`local_batch_size = 8`")
    total = reader.whole_number("training.global_batch_size", least=-1)
    total = total if total and total > 0 else None
    # Without a global batch there is one micro-batch for each step.
    accumulation = None if total else 1
    if "pipeline" in reader.draft.axes and micro:
        pieces = reader.whole_number("parallelism.pipeline_parallel_microbatch_size") or 1
        if total is None and micro % pieces == 0:
            accumulation, micro = micro // pieces, pieces
    reader.draft.batch = replace(reader.draft.batch, micro=micro, total=total, accumulation=accumulation)
    reader.carry(key, "data.batch: the global batch is micro-batch x accumulation x ranks")
    reader.carry("training.global_batch_size", f"data.batch = {total}")
    if total is None:
        reader.imply("training.global_batch_size", "-1 is the local batch x ranks")


def _read_float8(reader: KeyReader) -> None:
    """Reads the products in 8 bits, of today's table and of the former one. torchtitan casts parameters to bfloat16 for
    a pass, and a job multiplies in 8 bits from float32.
    """
    section = next((each for each in ("quantize.linear.float8", "float8") if reader.has(each)), "")
    if not section:
        return
    recipe = reader.text(f"{section}.recipe_name") or "tensorwise"
    if recipe not in ("tensorwise", "rowwise"):
        reader.name(f"{section}.recipe_name", "`recipe` of `train.precision = fp8` is `tensorwise` or `rowwise`")
        return
    filters = reader.value(f"{section}.filter_fqns")
    names = filters.split(",") if isinstance(filters, str) else filters if isinstance(filters, list) else []
    skip = tuple(f"*{name}*" for name in map(str, names) if name)
    emulates = bool(reader.flag(f"{section}.emulate"))
    gathers = read_float8_gather(reader, f"{section}.enable_fsdp_float8_all_gather", recipe)
    text = float8_text(recipe, skip, reader.draft, emulates=emulates, all_gather=gathers)
    reader.draft.set("train.precision", text, section)
    for key in ("recipe_name", "filter_fqns", "emulate"):
        reader.carry(f"{section}.{key}", f"train.precision = {text}")
    reader.imply(
        f"{section}.precompute_float8_dynamic_scale_for_fsdp", "one all-reduce gives the scales of all weights, if any"
    )


def _read_training(reader: KeyReader) -> None:
    steps = reader.whole_number("training.steps")
    if steps:
        reader.put("training.steps", "train.steps", str(steps))
    elif not reader.has("training.steps"):
        reader.default("train.steps", "10000", "steps = 10000")
    norm = reader.number("training.max_norm")
    if norm:
        reader.put("training.max_norm", "train.clip", value_text(norm))
    elif norm is None:
        reader.default("train.clip", "1.0", "max_norm = 1.0")
    precision = reader.text("training.mixed_precision_param") or "bfloat16"
    if precision == "bfloat16":
        reader.draft.set("train.precision", "bf16(level = O2)", "mixed_precision_param")
        reader.carry("training.mixed_precision_param", "train.precision = bf16(level = O2)")
        if not reader.has("training.mixed_precision_param"):
            reader.defaults.append("`mixed_precision_param = bfloat16`")
    elif precision == "float32":
        reader.imply("training.mixed_precision_param", "`train.precision` is fp32 by default")
    else:
        reader.name(
            "training.mixed_precision_param", "torchtitan scales no loss: `bfloat16` is `train.precision = bf16`"
        )
    _read_float8(reader)
    for key in ("training.seed", "debug.seed"):
        reader.put_number(key, "train.seed", least=0)
    for key in ("training.deterministic", "debug.deterministic"):
        reader.put_switch(key, "train.deterministic", "true", "false is the default")
    for key in ("training.compile", "compile.enable"):
        reader.put_switch(key, "train.compile", "true", "nothing is compiled, as by default")
    reader.put_switch(
        "training.enable_cpu_offload",
        "memory.offload",
        "[optimizer, parameters]",
        "all stays on the device, as by default",
    )


def _read_optimizer(reader: KeyReader) -> None:
    name = (reader.text("optimizer.name") or "AdamW").lower()
    if name not in ("adamw", "adam"):
        reader.warn_refused("optimizer.name", "Adam or AdamW")
        name = "adamw"
    reader.carry("optimizer.name", f"train.optimizer = {name}(…)")
    defaults = {"lr": 8e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    values = dict(defaults)
    for key, default in defaults.items():
        stated = reader.number(f"optimizer.{key}")
        if stated and (key not in ("beta1", "beta2") or stated < 1):
            values[key] = stated
        elif stated is None:
            reader.defaults.append(f"`optimizer.{key} = {default}`")
        elif key == "weight_decay":
            values[key] = stated
        reader.carry(f"optimizer.{key}", "train.optimizer." + ("betas" if key.startswith("beta") else key))
    reader.draft.optimizer = CallDraft(
        name,
        {
            "lr": value_text(values["lr"]),
            "betas": value_text([values["beta1"], values["beta2"]]),
            "eps": value_text(values["eps"]),
            "weight_decay": value_text(values["weight_decay"]),
        },
    )


_SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "sqrt"}


def _read_schedule(reader: KeyReader) -> None:
    """Reads a schedule that warms up, stays and decays; without a ratio it decays all along."""
    section = "lr_scheduler"
    old = "training.warmup_steps"
    warmup = reader.whole_number(f"{section}.warmup_steps", least=0)
    if warmup is None:
        warmup = reader.whole_number(old, least=0)
    if warmup is None:
        warmup = 200
        reader.defaults.append("`warmup_steps = 200`")
    steps = reader.whole_number("training.steps")
    if steps is not None:
        warmup = min(warmup, steps)  # as torchtitan does, with a warning
    shape = (reader.text(f"{section}.decay_type") or "linear").lower()
    floor_key = f"{section}.min_lr_factor" if reader.has(f"{section}.min_lr_factor") else f"{section}.lr_min"
    floor = reader.number(floor_key)
    ratio = reader.number(f"{section}.decay_ratio")
    arguments = {"warmup": quantity(warmup, "step")}
    if ratio == 0:
        word = "warmup_constant"
    elif ratio is not None and ratio <= 1:
        word = "warmup_stable_decay"
        arguments |= {"decay": f"{value_text(round(ratio * 100, 8))}%", "shape": _SHAPES.get(shape, "linear")}
    else:
        word = "warmup_cosine" if shape == "cosine" else "warmup_linear"
    if floor is not None and floor <= 1 and word != "warmup_constant":
        arguments["floor"] = value_text(floor)
    if shape not in _SHAPES:
        reader.warn_refused(f"{section}.decay_type", "linear, cosine or sqrt")
    elif shape == "sqrt" and ratio is None:
        reader.name(f"{section}.decay_type", "a decay is linear, along a cosine, or `1 - sqrt` at the end")
    reader.draft.schedule = CallDraft(word, arguments)
    for key in (f"{section}.warmup_steps", old):
        reader.carry(key, f"train.lr_schedule.warmup = {warmup} steps")
    for key in (f"{section}.decay_type", f"{section}.decay_ratio", floor_key):
        reader.carry(key, f"train.lr_schedule = {word}(…)")


def _read_memory(reader: KeyReader) -> None:
    mode = (reader.text("activation_checkpoint.mode") or "selective").lower()
    option = reader.text("activation_checkpoint.selective_ac_option") or "2"
    every = option if option.isascii() and option.isdigit() and 0 < int(option) < 10**4 else ""
    if mode == "full":
        text = "full"
    elif mode == "selective":
        text = ("full" if every == "1" else f"every({every})") if every else "selective"
    elif mode == "none":
        reader.imply("activation_checkpoint.mode", "nothing is recomputed, as by default")
        reader.imply("activation_checkpoint.selective_ac_option", "nothing is recomputed")
        return
    elif mode == "memory_budget":
        reader.name("activation_checkpoint.mode", "`memory.recompute = auto` recomputes what the memory asks for")
        return
    else:
        reader.warn_refused("activation_checkpoint.mode", "none, full, selective or memory_budget")
        return
    reader.draft.set("memory.recompute", text, f"activation_checkpoint.mode = {mode}")
    reader.carry("activation_checkpoint.mode", f"memory.recompute = {text}")
    reader.carry("activation_checkpoint.selective_ac_option", f"memory.recompute = {text}")


def _read_times(reader: KeyReader) -> None:
    logs = reader.whole_number("metrics.log_freq")
    if logs:
        reader.put("metrics.log_freq", "log.every", quantity(logs, "step"))
    board = reader.flag("metrics.enable_tensorboard")
    if board is not None:
        reader.put("metrics.enable_tensorboard", "log.tensorboard", "true" if board else "false")
    if reader.flag("metrics.enable_wandb"):
        put_logger(reader, "wandb", ("metrics.enable_wandb",), {})
    else:
        reader.imply("metrics.enable_wandb", "false is the default")
    reader.put_number("training.dataloader.num_workers", "data.workers", least=0)
    reader.imply("metrics.save_tb_folder", "TensorBoard files are in the run directory")
    enabled = "checkpoint.enable" if reader.has("checkpoint.enable") else "checkpoint.enable_checkpoint"
    keys = ("checkpoint.interval", "checkpoint.keep_latest_k", "checkpoint.folder", "checkpoint.interval_type")
    if not reader.flag(enabled):
        for key in (enabled, *keys):
            reader.imply(key, "no checkpoints are written, as by default")
        return
    interval = reader.whole_number("checkpoint.interval") or 500
    reader.draft.set("checkpoint.every", quantity(interval, "step"), "checkpoint.interval")
    for key in (enabled, "checkpoint.interval", "checkpoint.interval_type"):
        reader.carry(key, f"checkpoint.every = {interval} steps")
    keep = reader.whole_number("checkpoint.keep_latest_k", least=0)
    if keep:
        reader.draft.settings["checkpoint.keep"] = ConvertedSetting(str(keep), "checkpoint.keep_latest_k")
    reader.carry("checkpoint.keep_latest_k", f"checkpoint.keep = {keep}")
    reader.imply("checkpoint.folder", "checkpoints are in the run directory")
