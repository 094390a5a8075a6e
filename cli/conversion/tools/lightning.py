"""Carries the configuration of a Lightning CLI into a job: `trainer`, `optimizer`, `seed_everything`, batch sizes."""

from __future__ import annotations

import re
from dataclasses import replace

from dslc.conversion.config_file import ConfigFile
from dslc.conversion.draft import CallDraft, Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.conversion.key_table import key_table
from dslc.conversion.logger_keys import put_lightning_loggers
from dslc.conversion.tools.trainer_settings import excludes_offload, read_betas

NAME = "Lightning"
_SCRIPT = "it belongs to the program that reads the file"
_OPTIMIZERS = {"adamw": "adamw", "adam": "adam", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop",
               "nadam": "nadam", "lion": "lion",
               "adafactor": "adafactor"}  # fmt: skip
_ARGUMENTS = ("lr", "momentum", "nesterov", "alpha", "betas", "eps", "weight_decay", "amsgrad")
_ALLOWED = {
    "sgd": {"lr", "momentum", "nesterov", "weight_decay"},
    "rmsprop": {"lr", "alpha", "eps", "momentum", "weight_decay"},
    "lion": {"lr", "betas", "weight_decay"},
    "adafactor": {"lr", "weight_decay"},
}
_PRECISIONS = {
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "16-true": "fp16(level = O2)",
    "bf16-true": "bf16(level = O2)",
    "16": "fp16",
    "bf16": "bf16",
}
_STRATEGIES = {"deepspeed": 2, "deepspeed_stage_1": 1, "deepspeed_stage_2": 2, "deepspeed_stage_3": 3, "fsdp": 3}
# Strategies of older versions, which today's Lightning refuses.
_FORMER_STRATEGIES = {"ddp_sharded": 2, "fsdp_native": 3}
_REPLICAS = re.compile(
    "|ddp|auto|none|single_?device|ddp_(spawn|fork|notebook)|ddp_.*find_unused_parameters_(true|false)"
)
_OFFLOAD = re.compile("_cpu_offload$|_offload(_nvme)?$")
_OTHER_DEVICES = ("mps", "tpu", "xla", "single_xla", "single_tpu", "xla_debug", "modelparallel")


def read_lightning(file: ConfigFile, draft: Draft) -> None:
    """Adds the settings of the file, and the outcome of each key."""
    reader = KeyReader(NAME, file, draft, key_table("lightning"), auto_help="Lightning finds it on the machine",
                       script=_SCRIPT)  # fmt: skip
    _read_devices(reader)
    _read_batch(reader)
    _read_precision(reader)
    _read_strategy(reader)
    _read_length(reader)
    _read_optimizer(reader)
    _read_times(reader)
    reader.finish()


def _read_devices(reader: KeyReader) -> None:
    accelerator = reader.text("trainer.accelerator") or "gpu"
    on_cpu = reader.draft.wants_cpu = accelerator == "cpu"
    if accelerator in ("gpu", "cuda", "cpu"):
        reader.carry("trainer.accelerator", f"devices.{'cpus' if on_cpu else 'gpus'}")
    elif accelerator in _OTHER_DEVICES:
        reader.name("trainer.accelerator", "jobs run on GPUs and CPUs")
    else:
        reader.warn_refused("trainer.accelerator", "auto, cpu, gpu, cuda, mps or tpu")
    nodes = reader.whole_number("trainer.num_nodes") or 1
    count = _count_devices(reader, on_cpu)
    if count is None:
        reader.name("trainer.devices", "`devices.gpus = all` takes all of a machine; the batch follows from a count")
        reader.name("trainer.num_nodes", "`devices.nodes`, once the devices of each node are known")
        return
    strategy = str(reader.file.value("trainer.strategy") or "").lower().replace("_", "")
    if strategy == "singledevice":
        nodes, count = 1, 1
    if reader.draft.devices is None:
        reader.draft.devices = (nodes, count)
    reader.carry("trainer.devices", f"devices: {count} of each node")
    reader.carry("trainer.num_nodes", f"devices.nodes = {nodes}")


def _count_devices(reader: KeyReader, on_cpu: bool) -> int | None:
    """Returns the devices of a node; None where Lightning takes all that a machine has."""
    stated = reader.file.value("trainer.devices")
    if isinstance(stated, str) and (indices := re.fullmatch(r"\s*\d+\s*(,\s*\d*\s*)+", stated)):
        stated = [part for part in indices[0].split(",") if part.strip()]  # "0,1", and "3," for one device
    if isinstance(stated, str) and re.fullmatch(r"\s*-?\d{1,6}\s*", stated):
        stated = int(stated)
    if stated in (None, "auto"):
        return 1 if on_cpu else None  # Lightning starts one process on a CPU
    if isinstance(stated, list) and stated:
        return len(stated)
    if isinstance(stated, int) and not isinstance(stated, bool) and (0 < stated < 10**6 or stated == -1):
        return stated if stated > 0 else None
    reader.warn_refused("trainer.devices", "a number of devices, their indices, -1 or auto")
    return None


def _read_batch(reader: KeyReader) -> None:
    """Reads the batch of a data module, which each rank has."""
    keys = [key for key, _ in reader.file.values() if re.fullmatch(r"(data|model)(\.\w+)*\.(train_)?batch_size", key)]
    accumulation = reader.whole_number("trainer.accumulate_grad_batches") or 1
    micro = reader.whole_number(keys[0]) if keys else None
    reader.draft.batch = replace(reader.draft.batch, micro=micro, accumulation=accumulation)
    if keys:
        reader.carry(keys[0], "data.batch: the global batch is that of a rank x accumulation x ranks")
    reader.carry("trainer.accumulate_grad_batches", f"parallelism.microbatches = {accumulation}")
    workers = next((key for key, _ in reader.file.values() if re.fullmatch(r"data(\.\w+)*\.num_workers", key)), "")
    if workers:
        reader.put_number(workers, "data.workers", least=0)


def _read_precision(reader: KeyReader) -> None:
    stated = reader.text("trainer.precision")
    if stated in ("16", "16-mixed") and reader.draft.wants_cpu:
        reader.put("trainer.precision", "train.precision", "bf16")  # as Lightning does on a CPU
    elif stated in _PRECISIONS:
        reader.put("trainer.precision", "train.precision", _PRECISIONS[stated])
    elif stated in ("32", "32-true"):
        reader.imply("trainer.precision", "`train.precision` is fp32 by default")
    elif stated in ("transformer-engine", "transformer-engine-float16"):
        reader.name("trainer.precision", "`train.precision = fp8` has torchao's scales, not Transformer Engine's")
    elif stated in (None, "64", "64-true"):
        reader.name("trainer.precision", "a job computes in fp32, bf16, fp16 or fp8")
    else:
        reader.warn_refused("trainer.precision", "32-true, 16-mixed, bf16-mixed, 16-true, bf16-true or 64-true")


def _read_strategy(reader: KeyReader) -> None:
    stated = reader.value("trainer.strategy")
    key = "trainer.strategy"
    if isinstance(stated, dict):
        key = "trainer.strategy.class_path"
        name = (reader.text(key) or "").rpartition(".")[2].lower().removesuffix("strategy")
        number = reader.whole_number("trainer.strategy.init_args.stage", least=0)
        if name == "deepspeed" and number is not None and number <= 3:
            name = f"deepspeed_stage_{number}" if number else "ddp"
            reader.carry("trainer.strategy.init_args.stage", f"parallelism.zero = {number}")
    else:
        name = str(stated or "").lower()
    offloads = bool(_OFFLOAD.search(name))
    name = _OFFLOAD.sub("", name)
    stage = _STRATEGIES.get(name, _FORMER_STRATEGIES.get(name))
    if stage is not None:
        reader.put(key, "parallelism.zero", str(stage))
        if name in _FORMER_STRATEGIES:
            reader.warn_ignored(key, f"Lightning 2 refuses the strategy `{name}`", "write `fsdp` or `deepspeed`")
        if offloads and not excludes_offload(reader, key):
            reader.draft.set("memory.offload", "[optimizer, parameters]", name)
    elif _REPLICAS.fullmatch(name):
        reader.imply(key, "data ranks are replicas, by default", auto=True)
    elif key == "trainer.strategy" and name not in _OTHER_DEVICES:
        reader.warn_refused(key, "auto, ddp, fsdp, deepspeed and their variants")
    else:
        reader.name(key, "`parallelism { zero = …, tensor = … }` splits the work")


def _read_length(reader: KeyReader) -> None:
    steps = reader.whole_number("trainer.max_steps", least=-1)
    epochs = reader.whole_number("trainer.max_epochs", least=-1)
    if steps and steps > 0:
        reader.put("trainer.max_steps", "train.steps", str(steps))
        reader.name("trainer.max_epochs", "a training has one length, and `max_steps` is carried")
    elif epochs and epochs > 0:
        reader.put("trainer.max_epochs", "train.epochs", str(epochs))
        reader.imply("trainer.max_steps", "-1 leaves the length to `max_epochs`")
    elif epochs is not None:
        reader.name("trainer.max_epochs", "a training has a length: `train.epochs`, `train.steps` or `train.max_time`")
    elif not reader.has("trainer.max_time"):
        reader.default("train.epochs", "1000", "max_epochs = 1000")
    _read_max_time(reader)


def _read_max_time(reader: KeyReader) -> None:
    """Reads `DD:HH:MM:SS`, or the arguments of a `timedelta`."""
    stated = reader.value("trainer.max_time")
    parts = (
        re.fullmatch(r"(\d{1,4}):(\d{1,2}):(\d{1,2}):(\d{1,2})", stated, re.ASCII) if isinstance(stated, str) else None
    )
    seconds = None
    if parts:
        days, hours, minutes, rest = map(int, parts.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(stated, dict) and stated.keys() <= _SECONDS.keys():
        counts = [(reader.number(f"trainer.max_time.{unit}") or 0) * _SECONDS[unit] for unit in stated]
        seconds = int(min(sum(counts), 10**9))
    if seconds:
        reader.put("trainer.max_time", "train.max_time", f"{seconds} s")
    elif stated is not None:
        reader.warn_refused("trainer.max_time", "a time such as 00:12:00:00, of days, hours, minutes and seconds")


_SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800}


def _read_optimizer(reader: KeyReader) -> None:
    path = reader.text("optimizer.class_path")
    if path is None:
        return
    name = path.rpartition(".")[2].lower()
    if name not in _OPTIMIZERS:
        reader.name("optimizer", "there is no such optimizer: `optimizer = python(…)` takes one of yours")
        return
    word = _OPTIMIZERS[name]
    reader.carry("optimizer.class_path", f"train.optimizer = {word}(…)")
    arguments: dict[str, str] = {}
    for argument in _ARGUMENTS:
        key = f"optimizer.init_args.{argument}"
        if argument == "betas":
            if (betas := read_betas(reader, key, argument)) is not None:
                arguments[argument] = value_text(betas)
        elif isinstance(reader.value(key), list):
            continue  # the two `eps` of Adafactor
        elif argument in ("nesterov", "amsgrad"):
            if reader.flag(key):
                arguments[argument] = "true"
                reader.carry(key, f"train.optimizer.{argument} = true")
            else:
                reader.imply(key, "false is the default")
        elif (number := reader.number(key)) is not None:
            if (argument in ("momentum", "alpha") and number >= 1) or (argument in ("lr", "eps") and number == 0):
                reader.name(key, f"no optimizer of a job has such a value of `{argument}`")
                continue
            arguments[argument] = value_text(number)
            reader.carry(key, f"train.optimizer.{argument} = {arguments[argument]}")
    allowed = _ALLOWED.get(word, {"lr", "betas", "eps", "weight_decay", "amsgrad"})
    reader.draft.optimizer = CallDraft(word, {key: text for key, text in arguments.items() if key in allowed})


def _read_times(reader: KeyReader) -> None:
    if reader.has("trainer.logger"):
        put_lightning_loggers(reader, "trainer.logger")
    logs = reader.whole_number("trainer.log_every_n_steps", least=0)
    if logs:
        reader.put("trainer.log_every_n_steps", "log.every", quantity(logs, "step"))
    clip = reader.number("trainer.gradient_clip_val")
    algorithm = reader.text("trainer.gradient_clip_algorithm")
    by_value = algorithm == "value"
    if clip:
        text = f"value({value_text(clip)})" if by_value else value_text(clip)
        reader.put("trainer.gradient_clip_val", "train.clip", text)
        reader.carry("trainer.gradient_clip_algorithm", f"train.clip = {text}")
    else:
        reader.imply("trainer.gradient_clip_val", "0 clips nothing, as by default")
        reader.imply("trainer.gradient_clip_algorithm", "nothing is clipped")
    if algorithm not in (None, "value", "norm"):
        reader.warn_refused("trainer.gradient_clip_algorithm", "norm or value")
    epochs, interval = (
        reader.whole_number("trainer.check_val_every_n_epoch"),
        reader.number("trainer.val_check_interval"),
    )
    for key in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches",
                "overfit_batches", "val_check_interval"):  # fmt: skip
        share = reader.file.value(f"trainer.{key}")
        if isinstance(share, float | int) and (share < 0 or (isinstance(share, float) and share > 1)):
            reader.warn_refused(f"trainer.{key}", "a share up to 1.0, or a whole number of batches")
    if isinstance(interval, int) and interval > 1:
        reader.name("trainer.val_check_interval", "batches are no steps: `evaluate.every` is in steps or epochs")
    elif interval is not None and interval <= 1:
        reader.name("trainer.val_check_interval", "`evaluate.every` is in steps or whole epochs")
    if epochs:
        reader.put("trainer.check_val_every_n_epoch", "evaluate.every", quantity(epochs, "epoch"))
    deterministic = reader.value("trainer.deterministic")
    if deterministic not in (True, False, None, "warn"):
        reader.warn_refused("trainer.deterministic", "true, false or warn")
    elif deterministic in (True, "warn"):
        reader.put("trainer.deterministic", "train.deterministic", "true")
    else:
        reader.imply("trainer.deterministic", "false is the default")
    seed = reader.value("seed_everything")
    if isinstance(seed, bool):
        reader.name("seed_everything", "`train.seed` is a number, 0 by default")
    else:
        reader.put_number("seed_everything", "train.seed", least=0)
