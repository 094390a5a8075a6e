"""Carries an Accelerate configuration into a job: DDP, FSDP 1 and 2, DeepSpeed and its parallelism of several axes."""

from __future__ import annotations

from dataclasses import replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import ConvertedSetting, Draft, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.conversion.key_table import key_table
from dslc.conversion.tools.trainer_settings import excludes_offload, float8_text

NAME = "Accelerate"
_FSDP = "fsdp_config.fsdp_"
_DEEPSPEED = "deepspeed_config."
_AXES = "parallelism_config.parallelism_config_"
_SHARDING = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
_BY_NUMBER = dict(enumerate(_SHARDING, 1))
# What a DeepSpeed configuration states in the place of these keys, which Accelerate refuses beside one.
_EXCLUDED = ("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
             "offload_param_device", "zero3_save_16bit_model")  # fmt: skip


def read_accelerate(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the outcome of each key."""
    reader = KeyReader(
        NAME, file, draft, key_table("accelerate"), auto_help="the program that calls Accelerate decides it"
    )
    _read_devices(reader)
    kind = (reader.text("distributed_type") or "NO").upper()
    known = kind in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
    if known:
        reader.carry("distributed_type", f"parallelism: {'one device' if kind == 'NO' else kind}")
    else:
        reader.name("distributed_type", f"{kind[:40]} is none of MULTI_GPU, MULTI_CPU, FSDP and DEEPSPEED")
    reader.imply("compute_environment", "`launch.with` says who starts the processes")
    _read_precision(reader, level="(level = O2)" if kind in ("FSDP", "DEEPSPEED") else "")
    if kind == "FSDP":
        _read_fsdp(reader)
    elif kind == "DEEPSPEED":
        _read_deepspeed(reader)
    _read_axes(reader)
    _note_autos(reader)
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend"):
        backend = (reader.text(key) or "no").lower()
        if backend == "no":
            reader.imply(key, "nothing is compiled, as by default")
        else:
            reader.put(key, "train.compile", "true")
    for section in ("fsdp_config", "deepspeed_config"):
        stated = file.value(section)
        if isinstance(stated, dict) and stated and not section.startswith(kind.lower()):
            message = f"Accelerate ignores `{section}`: `distributed_type` is {kind}"
            reader.warn_ignored(section, message, f"remove it, or write `distributed_type: {section[:-7].upper()}`")
            reader.name(section, f"Accelerate ignores it, as `distributed_type` is {kind}")
    reader.finish(refuses=lambda key: "." not in key)


def _read_devices(reader: KeyReader) -> None:
    machines = reader.whole_number("num_machines", least=0) or 1
    processes = reader.whole_number("num_processes", least=-1)
    cpu = reader.flag("use_cpu")
    reader.draft.wants_cpu = bool(cpu)
    if cpu:
        reader.carry("use_cpu", "devices.cpus")
    else:
        reader.imply("use_cpu", "`devices.gpus` are GPUs")
    reader.carry("num_machines", f"devices.nodes = {machines}")
    if processes is not None and processes > 0:
        if processes % machines:
            reader.contradict(
                "num_processes",
                f"{processes} processes, which are all of them, cannot be shared out over {machines} machines",
                f"use {machines * max(1, processes // machines)} or another multiple of {machines}",
                other="num_machines",
            )
        elif reader.draft.devices is None:
            reader.draft.devices = (machines, processes // machines)
        reader.carry("num_processes", f"devices: {processes} in all")
    gpus = reader.text("gpu_ids")
    if gpus in (None, "all"):
        reader.imply("gpu_ids", "all GPUs that the job counts")
    else:
        reader.name("gpu_ids", "`devices.gpus = [0, 2]` names GPUs by their numbers")


def _read_precision(reader: KeyReader, level: str) -> None:
    precision = (reader.text("mixed_precision") or "no").lower()
    if precision in ("bf16", "fp16"):
        reader.put("mixed_precision", "train.precision", f"{precision}{level}")
    elif precision == "no":
        reader.imply("mixed_precision", "`train.precision` is fp32 by default")
    elif precision == "fp8" and (reader.text("fp8_config.backend") or "").upper() == "AO":
        reader.put("mixed_precision", "train.precision", float8_text("tensorwise", (), reader.draft))
        reader.carry("fp8_config.backend", "train.precision = fp8, by torchao")
        reader.note_default(
            "fp8_config.backend",
            "Accelerate leaves the first and the last dense layer in bf16, and a job those that `skip` names",
            'name them: `precision = fp8(skip = ["head"])`',
        )
    else:
        reader.name("mixed_precision", "`fp8` of a job is torchao's, which Accelerate takes by `backend: AO`")


def _read_fsdp(reader: KeyReader) -> None:
    strategy = reader.value(f"{_FSDP}sharding_strategy")
    name = _BY_NUMBER.get(strategy, "") if isinstance(strategy, int) else str(strategy or "").upper()
    reshard = reader.value(f"{_FSDP}reshard_after_forward")
    nodes = reader.draft.devices[0] if reader.draft.devices else 1
    stage = _SHARDING.get(name, 3)
    if not name and reshard is not None:
        stage = _SHARDING.get(str(reshard).upper(), 2 if str(reshard).lower() == "false" else 3)
        reader.carry(f"{_FSDP}reshard_after_forward", f"parallelism.zero = {stage}")
    else:
        reader.imply(f"{_FSDP}reshard_after_forward", "`fsdp_sharding_strategy` decides it")
    if stage:
        reader.draft.set("parallelism.zero", str(stage), name or "fsdp_reshard_after_forward")
    reader.carry(f"{_FSDP}sharding_strategy", f"parallelism.zero = {stage}")
    if "HYBRID" in name and nodes > 1:
        reader.draft.set("parallelism.replicas", str(nodes), name)
    if reader.flag(f"{_FSDP}offload_params"):
        _offload(reader, f"{_FSDP}offload_params")
    else:
        reader.imply(f"{_FSDP}offload_params", "all stays on the device, as by default")
    key = f"{_FSDP}activation_checkpointing"
    reader.put_switch(key, "memory.recompute", "full", "nothing is recomputed, as by default")


def _read_deepspeed(reader: KeyReader) -> None:
    stated = f"{_DEEPSPEED}deepspeed_config_file"
    reader.carry(stated, "the settings of that file")
    if reader.has(stated):
        for key in (*(f"{_DEEPSPEED}{name}" for name in _EXCLUDED), "mixed_precision"):
            if reader.has(key) and reader.text(key) != "no":
                reader.contradict(
                    key,
                    f"Accelerate refuses `{key}` beside `deepspeed_config_file`, which states it",
                    "state it in that file alone",
                    other=stated,
                )
        return
    draft = reader.draft
    stage = reader.whole_number(f"{_DEEPSPEED}zero_stage", least=0)
    stage = 2 if stage is None else min(stage, 3)
    if stage:
        draft.set("parallelism.zero", str(stage), "zero_stage")
    reader.carry(f"{_DEEPSPEED}zero_stage", f"parallelism.zero = {stage}")
    accumulation = reader.whole_number(f"{_DEEPSPEED}gradient_accumulation_steps")
    if accumulation:
        draft.batch = replace(draft.batch, accumulation=accumulation)
    reader.carry(f"{_DEEPSPEED}gradient_accumulation_steps", f"parallelism.microbatches = {accumulation}")
    clip = reader.number(f"{_DEEPSPEED}gradient_clipping")
    if clip:
        reader.put(f"{_DEEPSPEED}gradient_clipping", "train.clip", value_text(clip))
    elif clip is not None:  # Accelerate passes no 0 on, and DeepSpeed clips by default
        draft.set("train.clip", "1.0", "deepspeed_config.gradient_clipping")
        reader.name(
            f"{_DEEPSPEED}gradient_clipping", "Accelerate passes no 0 on: DeepSpeed clips to 1.0, as the job does"
        )
    elif not draft.arguments:  # the Trainer fills in its own
        reader.default("train.clip", "1.0", "deepspeed_config.gradient_clipping = 1.0")
    for part, least in (("optimizer", 1), ("param", 3)):
        key = f"{_DEEPSPEED}offload_{part}_device"
        device = (reader.text(key) or "none").lower()
        if device == "none":
            reader.imply(key, "it stays on the device")
        elif stage < least:
            message = f"DeepSpeed ignores `{key}`: it needs ZeRO stage {least}, and `zero_stage` is {stage}"
            reader.warn_ignored(key, message, "write `none`")
            reader.name(key, f"DeepSpeed ignores it in stage {stage}")
        else:
            _offload(reader, key)


# Keys of a DeepSpeed configuration that may be `auto`, and those here that replace it.
_RESOLVES = {
    "gradient_accumulation_steps": f"{_DEEPSPEED}gradient_accumulation_steps",
    "gradient_clipping": f"{_DEEPSPEED}gradient_clipping",
    "zero_optimization.stage": f"{_DEEPSPEED}zero_stage",
    "zero_optimization.offload_optimizer.device": f"{_DEEPSPEED}offload_optimizer_device",
    "zero_optimization.offload_param.device": f"{_DEEPSPEED}offload_param_device",
}


def _note_autos(reader: KeyReader) -> None:
    """Keeps the values that Accelerate puts into a DeepSpeed configuration in the place of `auto`."""
    autos = reader.draft.autos
    for key, source in _RESOLVES.items():
        if reader.has(source):
            autos[key] = (reader.value(source), f"`{source}` of Accelerate")
    precision = (reader.text("mixed_precision") or "no").lower()
    for word in ("fp16", "bf16"):
        autos[f"{word}.enabled"] = (precision == word, "`mixed_precision` of Accelerate")


def _offload(reader: KeyReader, key: str) -> None:
    """Moves optimizer and parameters to the host, unless the precision excludes it."""
    if not excludes_offload(reader, key):
        reader.put(key, "memory.offload", "[optimizer, parameters]")


def _read_axes(reader: KeyReader) -> None:
    for name, axis in (("tp_size", "tensor"), ("cp_size", "context"), ("sp_size", "context")):
        reader.put_axis(f"{_AXES}{name}", axis)
    copies = reader.whole_number(f"{_AXES}dp_replicate_size")
    shards = reader.whole_number(f"{_AXES}dp_shard_size")
    if shards and shards > 1:
        reader.draft.settings.setdefault("parallelism.zero", ConvertedSetting("3", "dp_shard_size"))
    if copies and copies > 1 and shards and shards > 1:
        reader.put(f"{_AXES}dp_replicate_size", "parallelism.replicas", str(copies))
    else:
        reader.imply(f"{_AXES}dp_replicate_size", "data ranks without shards are copies")
