"""Carries a DeepSpeed configuration into a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import CallDraft, ConvertedSetting, Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader, is_auto
from dslc.conversion.key_table import key_table
from dslc.conversion.logger_keys import put_logger
from dslc.conversion.tools.trainer_settings import excludes_offload, read_betas
from dslc.dsl.json_value import Json

NAME = "DeepSpeed"
_AUTO_HELP = "give the file of the Hugging Face arguments or of Accelerate, too"
_ZERO = "zero_optimization"
_OPTIMIZER = "optimizer.params"
_SCHEDULER = "scheduler.params"
# A key that may be `auto`, and the arguments of the Trainer that replace it.
_ARGUMENT_OF = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    f"{_OPTIMIZER}.lr": "learning_rate",
    f"{_OPTIMIZER}.eps": "adam_epsilon",
    f"{_OPTIMIZER}.weight_decay": "weight_decay",
    f"{_SCHEDULER}.warmup_max_lr": "learning_rate",
    f"{_SCHEDULER}.warmup_num_steps": "warmup_steps",
    f"{_SCHEDULER}.total_num_steps": "max_steps",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
_ABSENT_OPTIMIZERS = ("lamb", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")
# Sections whose unknown keys DeepSpeed refuses; it ignores unknown keys elsewhere.
_STRICT = ("fp16.", "bf16.", f"{_ZERO}.", "tensorboard.", "wandb.", "csv_monitor.", "compile.")


def read_deepspeed(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the outcome of each key. `draft.arguments` resolve `auto`."""
    autos = {**draft.autos, **resolve_autos(draft.arguments)}
    reader = KeyReader(NAME, file, draft, key_table("deepspeed"), autos=autos, auto_help=_AUTO_HELP)
    _compare_arguments(reader)
    _read_axes(reader)
    _read_batch(reader)
    _read_precision(reader)
    _read_zero(reader)
    _read_optimizer(reader)
    _read_scheduler(reader)
    _read_rest(reader)
    reader.finish(refuses=lambda key: key.startswith(_STRICT))


def resolve_autos(arguments: Mapping[str, Json]) -> dict[str, tuple[Json, str]]:
    """Returns the values that the Trainer puts in the place of `auto`."""
    autos = {
        key: (arguments[name], f"`{name}`") for key, name in _ARGUMENT_OF.items() if arguments.get(name) is not None
    }
    if "adam_beta1" in arguments:
        autos[f"{_OPTIMIZER}.betas"] = (
            [arguments["adam_beta1"], arguments["adam_beta2"]],
            "`adam_beta1`, `adam_beta2`",
        )
    if arguments:
        autos[f"{_SCHEDULER}.warmup_min_lr"] = (0, "the Trainer")
    return autos


def _compare_arguments(reader: KeyReader) -> None:
    """Reports a key that differs from the argument of the Trainer, which refuses such a pair."""
    for key, (value, name) in resolve_autos(reader.draft.arguments).items():
        stated = reader.file.value(key)
        if stated is None or is_auto(stated) or name == "the Trainer" or key.endswith("total_num_steps"):
            continue
        if stated != value and not (key.endswith("warmup_num_steps") and value == 0):
            reader.contradict(
                key,
                f"`{key}` is {value_text(stated)} here, and {value_text(value)} by the Trainer's {name}",
                'write "auto" here, or the same value in both files',
            )


def _read_axes(reader: KeyReader) -> None:
    for key, axis in (
        ("tensor_parallel.autotp_size", "tensor"),
        ("sequence_parallel_size", "context"),
        ("pipeline.stages", "pipeline"),
    ):
        reader.put_axis(key, axis, least=0)


def _read_batch(reader: KeyReader) -> None:
    micro = reader.whole_number("train_micro_batch_size_per_gpu")
    accumulation = reader.whole_number("gradient_accumulation_steps")
    total = reader.whole_number("train_batch_size")
    reader.draft.batch = replace(reader.draft.batch, micro=micro, accumulation=accumulation, total=total)
    reader.carry("train_batch_size", "data.batch")
    reader.carry("train_micro_batch_size_per_gpu", "data.batch: the global batch is micro-batch x accumulation x ranks")
    reader.carry("gradient_accumulation_steps", "parallelism.microbatches")
    if is_auto(reader.file.value("train_batch_size")) and reader.draft.arguments:
        reader.imply("train_batch_size", "`auto` is micro-batch x accumulation x ranks", auto=True)
    stated = [key for key in ("train_batch_size", "train_micro_batch_size_per_gpu") if reader.has(key)]
    if not stated:
        reader.draft.report.add(
            "E1103",
            "the configuration states no batch, and DeepSpeed refuses it",
            None,
            help="state `train_batch_size` or `train_micro_batch_size_per_gpu`",
        )


def _read_precision(reader: KeyReader) -> None:
    draft = reader.draft
    fp16, bf16 = reader.flag("fp16.enabled"), reader.flag("bf16.enabled")
    if reader.has("bfloat16") and not reader.has("bf16"):
        bf16 = reader.flag("bfloat16.enabled")
        reader.carry("bfloat16.enabled", f"train.precision{' = bf16(level = O2)' if bf16 else ''}")
    autocast, amp = reader.flag("torch_autocast.enabled"), reader.flag("amp.enabled")
    if fp16 and bf16:
        reader.contradict(
            "bf16.enabled",
            "`fp16` and `bf16` are both enabled, and DeepSpeed refuses it",
            "enable one of them",
            other="fp16.enabled",
        )
    precision = "bf16(level = O2)" if bf16 else "fp16(level = O2)" if fp16 else ""
    key = "bf16.enabled" if bf16 else "fp16.enabled"
    if autocast:
        dtype = str(reader.value("torch_autocast.dtype") or "bfloat16")
        precision, key = (
            ("fp16" if "float16" in dtype and "bfloat16" not in dtype else "bf16"),
            "torch_autocast.enabled",
        )
        reader.carry("torch_autocast.dtype", f"train.precision = {precision}")
    elif amp:
        level = reader.text("amp.opt_level") or "O1"
        precision, key = ("fp16(level = O2)" if level == "O2" else "fp16"), "amp.enabled"
        reader.carry("amp.opt_level", f"train.precision = {precision}")
    if precision:
        reader.put(key, "train.precision", precision)
    elif fp16 is False or bf16 is False:
        draft.drop("train.precision")  # the Trainer's `bf16` is compared above
    for switch in ("fp16.enabled", "bf16.enabled"):
        if reader.flag(switch) is False:
            reader.carry(switch, f"train.precision{f' = {precision}' if precision else ' = fp32, the default'}")
    scale = reader.number("fp16.loss_scale")
    if scale:
        reader.name("fp16.loss_scale", "the loss scale is dynamic: `precision = fp16` finds it by itself")
    elif scale is not None:
        reader.imply("fp16.loss_scale", "0 is a dynamic scale, and `precision = fp16` finds it by itself")


def _read_zero(reader: KeyReader) -> None:
    if isinstance(reader.file.value(_ZERO), bool):
        reader.name(_ZERO, "it is the form of the first versions, without a stage")
        return
    stage = reader.whole_number(f"{_ZERO}.stage", least=0) or 0
    if stage > 3:
        reader.contradict(f"{_ZERO}.stage", f"ZeRO has no stage {stage}", "write 0, 1, 2 or 3")
        return
    if stage:
        reader.put(f"{_ZERO}.stage", "parallelism.zero", str(stage))
    else:
        reader.imply(f"{_ZERO}.stage", "`parallelism.zero` is 0 by default")
    _read_offload(reader, stage)
    shard = reader.whole_number(f"{_ZERO}.mics_shard_size", least=-1)
    if shard and shard > 0:
        reader.name(f"{_ZERO}.mics_shard_size", "`parallelism.replicas` is the number of data ranks over this size")
    elif shard is not None:
        reader.imply(f"{_ZERO}.mics_shard_size", "-1 is one partition over all data ranks")
    if (reader.whole_number(f"{_ZERO}.zero_hpz_partition_size", least=0) or 0) <= 1:
        reader.imply(f"{_ZERO}.zero_hpz_partition_size", "1 is one partition over all data ranks")
    if stage < 3:
        section = reader.file.value(_ZERO)
        keys = [key for key in section if key.startswith("stage3_")] if isinstance(section, dict) else []
        if keys:
            shown = f"`{keys[0]}`" + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
            reader.warn_ignored(
                f"{_ZERO}.{keys[0]}",
                f"DeepSpeed uses {shown} in stage 3 alone, and the stage is {stage}",
                "remove them",
            )


def _read_offload(reader: KeyReader, stage: int) -> None:
    """Reads `offload_optimizer`, `offload_param` and the older `cpu_offload`."""
    moved: list[str] = []
    for key, part, least in (("offload_optimizer", "optimizer", 1), ("offload_param", "parameters", 3)):
        path = f"{_ZERO}.{key}.device"
        device, old = reader.text(path), f"{_ZERO}.{'cpu_offload' if part == 'optimizer' else 'cpu_offload_param'}"
        stated = path if device in ("cpu", "nvme") else old if reader.flag(old) else ""
        if not stated:
            reader.imply(path, "it stays on the device")
            reader.imply(old, "it stays on the device")
        elif stage < least:
            message = f"DeepSpeed moves {part} from stage {least} on, and the stage is {stage}"
            reader.warn_ignored(stated, message, "remove it")
            reader.name(stated, f"DeepSpeed moves {part} from stage {least} on")
        elif excludes_offload(reader, stated):
            continue
        elif device == "nvme":
            moved.append(part)
            reader.name(path, "a job keeps nothing on NVMe: `memory.offload` moves to the host's memory")
        else:
            moved.append(part)
            reader.carry(stated, "memory.offload = [optimizer, parameters], which are updated in one place")
    if moved:
        reader.draft.set("memory.offload", "[optimizer, parameters]", _ZERO)


def _read_optimizer(reader: KeyReader) -> None:
    kind = (reader.text("optimizer.type") or "").lower()
    if not kind:
        return
    if kind in ("adam", "adamw"):
        decoupled = kind == "adamw" or reader.flag(f"{_OPTIMIZER}.adam_w_mode") is not False
        call = CallDraft("adamw" if decoupled else "adam", {"weight_decay": "0"} if decoupled else {})
        if kind == "adam" and decoupled:
            reader.note_default(
                "optimizer.type",
                "DeepSpeed's `Adam` is AdamW, with decoupled weight decay, unless `adam_w_mode` is false",
                "`optimizer = adamw(…)` is the same update; `adam(…)` adds the decay to the gradient",
            )
        reader.carry(f"{_OPTIMIZER}.adam_w_mode", f"train.optimizer = {call.word}(…)")
    elif kind == "onebitadam":
        steps = reader.whole_number(f"{_OPTIMIZER}.freeze_step") or 100_000
        call = CallDraft("onebit_adam", {"freeze": quantity(steps, "step")})
        reader.carry(f"{_OPTIMIZER}.freeze_step", "train.optimizer.freeze")
    elif kind in ("sgd", "adagrad", "rmsprop", "nadam", "lion"):
        call = CallDraft(kind)
    elif kind == "muon":
        call = _read_muon(reader)
    else:
        known = "" if kind in _ABSENT_OPTIMIZERS else ", and DeepSpeed looks it up in torch.optim"
        reason = f"there is no such optimizer{known}: `optimizer = python(…)` takes one of yours"
        reader.name("optimizer", reason)
        reader.name("optimizer.type", reason)
        call = CallDraft("adamw")
        reader.draft.set("train.optimizer", "", f"{kind} is not there: adamw, or python(…) of yours")
    if call.word != "adamw" or kind in ("adam", "adamw"):
        reader.carry("optimizer.type", f"train.optimizer = {call.word}(…)")
    reader.draft.optimizer = call if kind == "muon" else _with_parameters(reader, call)
    _read_norm(reader)


# Arguments of `muon`: the keys that state each, the first that the file has, and DeepSpeed's default.
_MUON: dict[str, tuple[tuple[str, ...], Json]] = {
    "lr": (("muon_lr", "lr"), 0.02),
    "momentum": (("momentum",), 0.95),
    "weight_decay": (("weight_decay",), 0),
    "adamw_lr": (("adam_lr", "lr"), 3e-4),
    "adamw_betas": (("betas",), [0.9, 0.95]),
    "adamw_eps": (("eps",), 1e-10),
}


def _read_muon(reader: KeyReader) -> CallDraft:
    """Returns Muon with the arguments of both kinds of parameters, which DeepSpeed tells apart by their names."""
    arguments: dict[str, str] = {}
    carried: dict[str, list[str]] = {}
    for argument, (keys, default) in _MUON.items():
        key = next((key for key in keys if reader.has(f"{_OPTIMIZER}.{key}")), "")
        path = f"{_OPTIMIZER}.{key}"
        if key == "betas":
            value: Json = read_betas(reader, path, argument)
        else:
            value = reader.number(path) if key else default
        if (value == 0 and argument in ("lr", "adamw_lr", "adamw_eps")) or (
            key == "momentum" and (reader.number(path) or 0) >= 1
        ):
            reader.name(path, f"`muon` has no such value of `{argument}`")
        elif value is not None:
            arguments[argument] = value_text(value)
            carried.setdefault(path, []).append(f"train.optimizer.{argument} = {arguments[argument]}")
        if not key:
            reader.defaults.append(f"`{argument} = {value_text(default)}`")
    for path, texts in carried.items():
        reader.carry(path, ", ".join(texts))
    arguments["adamw"] = '["*embed*", "*lm_head*"]'
    for key in ("nesterov", "ns_steps", "amsgrad"):
        reason = "DeepSpeed's Muon does not read it: it has Nesterov's momentum and 5 iterations, as `muon` by default"
        reader.name(f"{_OPTIMIZER}.{key}", reason)
    _read_zero_of_muon(reader)
    reader.note_default(
        "optimizer.type",
        "DeepSpeed's Muon takes all parameters of at least two dimensions, but for names with `embed` and `lm_head`",
        "`adamw` of `muon(…)` names the same matrices; kernels of convolutions belong to AdamW in a job",
    )
    order = ("lr", "momentum", "weight_decay", "adamw", "adamw_lr", "adamw_betas", "adamw_eps")
    return CallDraft("muon", {name: arguments[name] for name in order if name in arguments})


def _read_zero_of_muon(reader: KeyReader) -> None:
    """Chooses the stage of ZeRO with which ranks have whole matrices."""
    stage = reader.whole_number(f"{_ZERO}.stage", least=0) or 0
    draft = reader.draft
    is_low = "O2" in draft.settings.get("train.precision", ConvertedSetting("")).text
    has_parts = is_low or draft.axes.get("pipeline", 1) > 1 or draft.axes.get("context", 1) > 1
    fine = 0 if has_parts else 1
    if stage > fine:
        draft.set("parallelism.zero", str(fine), f"{_ZERO}.stage = {stage}, under which ranks would have parts")
        reader.name(f"{_ZERO}.stage", f"`muon` needs whole matrices: `zero = {fine}` has the same numbers")
    if draft.axes.get("tensor", 1) > 1:
        reader.name("tensor_parallel.autotp_size", "`muon` needs whole matrices, and a tensor axis cuts them (E0723)")


# Arguments that some optimizers alone have.
_ONLY_IN = {
    "momentum": ("sgd", "rmsprop"),
    "alpha": ("rmsprop",),
    "eps": ("adam", "adamw", "nadam", "adagrad", "rmsprop", "onebit_adam"),
}


def _with_parameters(reader: KeyReader, call: CallDraft) -> CallDraft:
    """Returns the call with the arguments that the optimizers of DeepSpeed and of a job share."""
    arguments: dict[str, str] = {}
    for key in ("lr", "eps", "weight_decay", "momentum", "alpha"):
        path = f"{_OPTIMIZER}.{key}"
        if call.word not in _ONLY_IN.get(key, (call.word,)):
            continue
        value = reader.number(path)
        if value is None:
            continue
        if (key in ("lr", "eps") and value == 0) or (key in ("momentum", "alpha") and value >= 1):
            reader.name(path, f"no optimizer of a job has such a value of `{key}`")
            continue
        arguments[key] = value_text(value)
        reader.carry(path, f"train.optimizer.{key} = {arguments[key]}")
    betas = read_betas(reader, f"{_OPTIMIZER}.betas", "betas")
    if betas is not None:
        arguments["betas"] = value_text(betas)
    for flag in ("amsgrad", "nesterov"):
        if reader.flag(f"{_OPTIMIZER}.{flag}") is not None:
            reader.imply(f"{_OPTIMIZER}.{flag}", "false is the default")
            if reader.flag(f"{_OPTIMIZER}.{flag}"):
                arguments[flag] = "true"
                reader.carry(f"{_OPTIMIZER}.{flag}", f"train.optimizer.{flag} = true")
    order = ("lr", "momentum", "nesterov", "alpha", "betas", "eps", "weight_decay", "amsgrad", "freeze")
    merged = {**call.arguments, **arguments}
    return replace(call, arguments={name: merged[name] for name in order if name in merged})


def _read_norm(reader: KeyReader) -> None:
    norm = reader.number(f"{_OPTIMIZER}.max_grad_norm")
    if norm and not reader.has("gradient_clipping"):
        reader.put(f"{_OPTIMIZER}.max_grad_norm", "train.clip", value_text(norm))
    elif norm is not None:
        reader.name(f"{_OPTIMIZER}.max_grad_norm", "`gradient_clipping` is carried in its place")


_SCHEDULES = {
    "WarmupLR": "warmup_constant",
    "WarmupDecayLR": "warmup_linear",
    "WarmupCosineLR": "warmup_cosine",
}


def _read_scheduler(reader: KeyReader) -> None:
    kind = reader.text("scheduler.type")
    if kind is None:
        return
    if kind not in _SCHEDULES:
        reason = "there is no such schedule: `one_cycle(…)` is torch's, and `python(…)` takes one of yours"
        reader.name("scheduler", reason)
        return
    draft = reader.draft
    call = CallDraft(_SCHEDULES[kind])
    reader.carry("scheduler.type", f"train.lr_schedule = {call.word}(…)")
    steps = reader.whole_number(f"{_SCHEDULER}.warmup_num_steps", least=0)
    if not reader.has(f"{_SCHEDULER}.warmup_num_steps"):
        steps = 1000  # DeepSpeed's default
    arguments = {"warmup": quantity(steps, "step")} if steps else {}
    reader.carry(f"{_SCHEDULER}.warmup_num_steps", f"train.lr_schedule.warmup = {quantity(steps or 0, 'step')}")
    share = reader.draft.arguments.get("warmup_ratio")
    if not steps and is_auto(reader.file.value(f"{_SCHEDULER}.warmup_num_steps")) and isinstance(share, float):
        arguments = {"warmup": f"{value_text(round(share * 100, 8))}%"}
        text = f"train.lr_schedule.warmup = {arguments['warmup']}, from `warmup_ratio`"
        reader.imply(f"{_SCHEDULER}.warmup_num_steps", text, auto=True)
    _read_rates(reader, arguments)
    if kind == "WarmupCosineLR":
        floor = reader.number(f"{_SCHEDULER}.cos_min_ratio")
        arguments["floor"] = value_text(0.0001 if floor is None else min(floor, 1))
        reader.carry(f"{_SCHEDULER}.cos_min_ratio", f"train.lr_schedule.floor = {arguments['floor']}")
    total = reader.whole_number(f"{_SCHEDULER}.total_num_steps")
    if total is not None and kind != "WarmupLR":
        reader.put(f"{_SCHEDULER}.total_num_steps", "train.steps", str(total))
        draft.drop("train.epochs")
    elif is_auto(reader.file.value(f"{_SCHEDULER}.total_num_steps")) and draft.arguments:
        reader.imply(f"{_SCHEDULER}.total_num_steps", "`auto` is the length of the training", auto=True)
    warmup_type = reader.text(f"{_SCHEDULER}.warmup_type") or "log"
    if warmup_type != "linear" and steps:
        reader.note_default(
            "scheduler.type",
            f"DeepSpeed's `{kind}` rises along a logarithm, unless `warmup_type` is `linear`; the job rises linearly",
            'write `"warmup_type": "linear"` to have the same in DeepSpeed, or `lr_schedule = python(…)` of your own',
        )
    reader.name(f"{_SCHEDULER}.warmup_type", "a warm-up is linear")
    if warmup_type == "linear":
        reader.carry(f"{_SCHEDULER}.warmup_type", "train.lr_schedule: a warm-up is linear")
    reader.imply(f"{_SCHEDULER}.last_batch_iteration", "a resumed training goes on where it stopped")
    draft.schedule = replace(call, arguments=arguments)


def _read_rates(reader: KeyReader, arguments: dict[str, str]) -> None:
    """Reads the rates of a warm-up, which DeepSpeed lays over the optimizer's."""
    optimizer = reader.draft.optimizer
    peak = reader.number(f"{_SCHEDULER}.warmup_max_lr")
    lowest = reader.number(f"{_SCHEDULER}.warmup_min_lr")
    lr = optimizer.arguments.get("lr") if optimizer else None
    if peak:
        stated = f"{_OPTIMIZER}.lr"
        if lr is not None and float(lr) != peak and reader.has(stated):
            reader.warn_ignored(
                stated,
                f"DeepSpeed ignores `{stated}` = {lr}: the schedule's `warmup_max_lr` is {value_text(peak)}",
                "write the same rate in both",
            )
            reader.name(stated, "the schedule's `warmup_max_lr` is carried, as DeepSpeed does")
        if optimizer:
            reader.draft.optimizer = optimizer.having(lr=value_text(peak))
        else:
            reader.draft.optimizer = CallDraft("adamw", {"lr": value_text(peak)})
        reader.carry(f"{_SCHEDULER}.warmup_max_lr", f"train.optimizer.lr = {value_text(peak)}")
    ratio = reader.number(f"{_SCHEDULER}.warmup_min_ratio")
    if "warmup" in arguments:
        top = peak or (float(lr) if lr else 0)
        share = ratio if ratio is not None else lowest / top if lowest and top else 0
        arguments["from"] = value_text(min(round(share, 12), 1) or 0)
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        reader.carry(f"{_SCHEDULER}.{key}", f"train.lr_schedule.from = {arguments.get('from', '0')}")


def _read_clip(reader: KeyReader) -> None:
    clip, optimizer = reader.number("gradient_clipping"), reader.draft.optimizer
    if optimizer is not None and optimizer.word == "onebit_adam":
        reader.draft.drop("train.clip")
        reader.name("gradient_clipping", "each rank has a gradient of its own under `onebit_adam`, and none is clipped")
    elif clip:
        reader.put("gradient_clipping", "train.clip", value_text(clip))
    elif clip is not None:
        reader.draft.drop("train.clip")
        reader.imply("gradient_clipping", "0 clips nothing, as by default in a job")
    elif not reader.has("gradient_clipping") and not reader.has(f"{_OPTIMIZER}.max_grad_norm"):
        reader.default("train.clip", "1.0", "gradient_clipping = 1.0")


def _read_rest(reader: KeyReader) -> None:
    _read_clip(reader)
    steps = reader.number("steps_per_print")
    if steps and 1 <= steps < 10**9:
        reader.put("steps_per_print", "log.every", quantity(steps, "step"))
    elif steps is not None:
        reader.name("steps_per_print", "a job logs every 10 steps, or every `log.every`")
    if reader.flag("dataloader_drop_last") is not None:
        keep = "drop" if reader.flag("dataloader_drop_last") else "keep"
        reader.put("dataloader_drop_last", "data.last_batch", keep)
    tensorboard = reader.flag("tensorboard.enabled")
    if tensorboard is not None:
        reader.put("tensorboard.enabled", "log.tensorboard", "true" if tensorboard else "false")
    if reader.flag("wandb.enabled"):
        names = {"project": "wandb.project", "entity": "wandb.team", "group": "wandb.group"}
        put_logger(reader, "wandb", ("wandb.enabled",), names)
    if reader.flag("csv_monitor.enabled"):
        put_logger(reader, "csv", ("csv_monitor.enabled",), {"dir": "csv_monitor.output_path"})
    dtype = reader.text("communication_data_type")
    if dtype in ("fp16", "float16", "bf16", "bfloat16") and not reader.whole_number(f"{_ZERO}.stage", least=0):
        reader.put("communication_data_type", "parallelism.gradients", "bf16()" if dtype.startswith("b") else "fp16()")
    elif dtype in ("fp32", "float32"):
        reader.imply("communication_data_type", "gradients are exchanged in fp32")
    else:
        reader.name("communication_data_type", "with ZeRO, gradients are exchanged in the precision of the training")
