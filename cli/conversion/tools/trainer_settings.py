"""Settings that several tools state in the same words: precision, length, optimizer, schedule, adapter, model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

from dslc.conversion.draft import CallDraft, Draft, quantity, value_text
from dslc.conversion.key_reader import KeyReader
from dslc.dsl.json_value import Json
from dslc.dsl.words import quoted

# Names of optimizers, and the call of a job with the same update.
OPTIMIZERS = {
    "adamw": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "rmsprop": "rmsprop",
    "adam": "adam",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}
_SMALLER_STATE = ("8bit", "4bit", "fp8", "paged", "anyprecision", "torchao")
SCHEDULES = {
    "linear": "warmup_linear",
    "cosine": "warmup_cosine",
    "cosine_with_min_lr": "warmup_cosine",
    "constant": "constant",
    "constant_with_warmup": "warmup_constant",
    "warmup_stable_decay": "warmup_stable_decay",
}
NO_DECAY = '["*.bias", "*norm*"]'


def read_precision(reader: KeyReader, *, level: str = "") -> None:
    """Reads `fp16` and `bf16`; one of the two may be true."""
    fp16 = reader.flag("fp16")
    bf16 = reader.file.value("bf16") == "full" or reader.flag("bf16")
    if fp16 and bf16:
        reader.contradict(
            "bf16", f"`fp16` and `bf16` are both true: {reader.tool} refuses it", "set one of them", other="fp16"
        )
    word = "bf16" if bf16 else "fp16" if fp16 else ""
    if word:
        reader.put(word, "train.precision", f"{word}{level}")
    for key, flag in (("fp16", fp16), ("bf16", bf16)):
        if flag is False:
            reader.imply(key, "`train.precision` is fp32 by default" if not word else f"`train.precision` is {word}")


def float8_text(
    recipe: str, skip: Sequence[str], draft: Draft, *, emulates: bool = False, all_gather: bool = False
) -> str:
    """Returns `fp8` with its arguments; on a CPU it is emulated."""
    arguments = [recipe] if recipe != "tensorwise" else []
    arguments += [f"skip = {value_text(list(skip))}"] if skip else []
    arguments += ["all_gather = true"] if all_gather else []
    arguments += ["emulate = true"] if emulates or draft.wants_cpu else []
    return f"fp8({', '.join(arguments)})" if arguments else "fp8"


def read_float8_gather(reader: KeyReader, key: str, recipe: str = "tensorwise") -> bool:
    """Returns whether weights are gathered in 8 bits; where a job cannot, the verdict of the key says why."""
    draft, zero = reader.draft, reader.draft.settings.get("parallelism.zero")
    ranks = draft.batch.ranks or math.prod(draft.devices or (1,)) // draft.model_ranks
    if not reader.flag(key):
        reader.imply(key, "parameters are gathered in 32 bits, as by default")
    elif recipe != "tensorwise":
        reader.name(key, "weights are gathered in 8 bits with `recipe = tensorwise` alone")
    elif zero is None or zero.text != "3":
        reader.name(key, "without `zero = 3` weights are not gathered for each pass")
    elif "tensor" in draft.axes:
        reader.name(key, "on a tensor axis weights are gathered in 32 bits")
    elif ranks < 2:
        reader.name(key, "`fp8(…, all_gather = true)`, once the job states several data ranks")
    else:
        reader.carry(key, "train.precision = fp8(all_gather = true)")
        return True
    return False


def excludes_offload(reader: KeyReader, key: str) -> bool:
    """Returns whether the precision excludes offloading, which `key` asks for; then the verdict of the key says why."""
    precision = reader.draft.settings.get("train.precision")
    if precision is None or not precision.text.startswith("fp16"):
        return False
    reader.name(key, "scaling the loss needs every gradient on the device: with `bf16`, a job offloads")
    return True


def read_length(reader: KeyReader, steps_key: str, epochs_key: str, default_epochs: int | None = None) -> None:
    """Reads the length in steps, or in epochs; a fraction of an epoch is rounded up."""
    draft = reader.draft
    steps = reader.whole_number(steps_key, least=-1)
    epochs = reader.number(epochs_key)
    if steps and steps > 0:
        reader.put(steps_key, "train.steps", str(steps))
        reader.imply(epochs_key, f"`{steps_key}` is the length")
        return
    reader.imply(steps_key, f"-1 leaves the length to `{epochs_key}`")
    if epochs:
        count = max(1, math.ceil(min(epochs, 10**9)))
        draft.set("train.epochs", str(count), epochs_key)
        if count == epochs:
            reader.carry(epochs_key, f"train.epochs = {count}")
        else:
            reader.name(epochs_key, f"an epoch is not cut: `train.epochs` is {count}, and `train.steps` cuts")
    elif default_epochs is not None and not reader.has(epochs_key):
        reader.default("train.epochs", str(default_epochs), f"{epochs_key} = {default_epochs}")


def read_optimizer(reader: KeyReader, key: str, default: str) -> None:
    """Reads an optimizer by its name, with `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2` and more."""
    name = (reader.text(key) or default).lower()
    if not reader.has(key):
        reader.defaults.append(f"`{key} = {default}`")
    word = OPTIMIZERS.get(name)
    in_codes = re.fullmatch("(paged_)?adamw_(8bit|bnb_8bit)", name)
    start = next((start for start in ("adamw", "lion") if name.removeprefix("paged_").startswith(start)), None)
    if in_codes or name == "adamw_torch_8bit":
        word = "adamw"
        reader.carry(key, "train.optimizer = adamw(state = 8bit)")
    if in_codes:
        reader.name(
            key,
            "`adamw(state = 8bit)` has torchao's codes, which round otherwise than bitsandbytes', and has them of "
            "embeddings too",
        )
    elif word is None and start and any(part in name for part in _SMALLER_STATE):
        word = start
        reader.name(key, f"the state of an optimizer is in fp32: `{word}` has the same update, and more state")
    elif word is None and name == "adafactor":
        word = name
        reader.name(
            key,
            f"the update is another: torch's `adafactor` multiplies the rate by the scale of a parameter, and "
            f"{reader.tool} takes the rate as it is",
        )
    elif word is None:
        word = "adamw"
        reader.name(key, f"there is no `{name[:40]}`: `optimizer = python(…)` takes one of yours")
    else:
        reader.carry(key, f"train.optimizer = {word}(…)")
    assert word is not None
    arguments: dict[str, str] = {}
    rate = reader.number("learning_rate")
    if rate:
        arguments["lr"] = value_text(rate)
        reader.carry("learning_rate", f"train.optimizer.lr = {arguments['lr']}")
    arguments |= _read_adam_betas(reader, word)
    if word in ("adamw", "adam"):
        epsilon = reader.number("adam_epsilon")
        if epsilon:
            arguments["eps"] = value_text(epsilon)
            reader.carry("adam_epsilon", f"train.optimizer.eps = {arguments['eps']}")
    decay = reader.number("weight_decay")
    if decay is not None or word == "adamw":
        arguments["weight_decay"] = value_text(decay or 0)
        reader.carry("weight_decay", f"train.optimizer.weight_decay = {arguments['weight_decay']}")
    if in_codes or name == "adamw_torch_8bit":
        arguments["state"] = "8bit"
    reader.draft.optimizer = CallDraft(word, arguments)
    if decay:
        reader.draft.set("train.no_decay", NO_DECAY, f"{reader.tool} decays no biases and norms")


def read_betas(reader: KeyReader, key: str, argument: str) -> list[Json] | None:
    """Returns the two betas of a list, which the `argument` of the optimizer has."""
    betas = reader.value(key)
    if isinstance(betas, list) and len(betas) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in betas):
        numbers: list[Json] = [float(beta) for beta in betas if isinstance(beta, int | float)]
        reader.carry(key, f"train.optimizer.{argument} = {value_text(numbers)}")
        return numbers
    if betas is not None:
        reader.name(key, "betas are two numbers from 0 up to 1")
    return None


def _read_adam_betas(reader: KeyReader, word: str) -> dict[str, str]:
    """Returns the argument `betas`, where the file states it or the tool's default is not a job's."""
    stated = {key: reader.number(key) for key in ("adam_beta1", "adam_beta2")}
    is_default = word != "lion" and all(beta is None for beta in stated.values())
    if (
        word not in ("adamw", "adam", "lion")
        or is_default
        or any(beta is not None and beta >= 1 for beta in stated.values())
    ):
        return {}
    defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999}
    text = value_text([float(defaults[key] if beta is None else beta) for key, beta in stated.items()])
    for key, beta in stated.items():
        reader.carry(key, f"train.optimizer.betas = {text}")
        if beta is None and word == "lion":
            reader.defaults.append(f"`{key} = {defaults[key]}`")
    return {"betas": text}


def read_schedule(reader: KeyReader, key: str, default: str) -> None:
    """Reads a schedule of `transformers` by its name, with `warmup_steps` or `warmup_ratio`."""
    name = (reader.text(key) or default).lower()
    if not reader.has(key):
        reader.defaults.append(f"`{key} = {default}`")
    word = SCHEDULES.get(name)
    warmup = _read_warmup(reader)
    if word is None:
        reader.name(key, f"there is no `{name[:40]}`: `lr_schedule = python(…)` takes one of yours")
        return
    reader.carry(key, f"train.lr_schedule = {word}")
    arguments: dict[str, str] = {}
    if word != "constant":
        if warmup:
            arguments = {"warmup": warmup, "from": "0"}
        floor = reader.number("lr_scheduler_kwargs.min_lr_rate")
        if floor is not None and floor <= 1 and word == "warmup_cosine":
            arguments["floor"] = value_text(floor)
            reader.carry("lr_scheduler_kwargs.min_lr_rate", f"train.lr_schedule.floor = {arguments['floor']}")
        decay = reader.whole_number("lr_scheduler_kwargs.num_decay_steps")
        if decay and word == "warmup_stable_decay":
            arguments["decay"] = quantity(decay, "step")
            reader.carry("lr_scheduler_kwargs.num_decay_steps", f"train.lr_schedule.decay = {decay} steps")
    reader.draft.schedule = CallDraft(word, arguments)


def _read_warmup(reader: KeyReader) -> str:
    """Returns the warm-up as text of the language, "" for none."""
    steps, ratio = reader.number("warmup_steps"), reader.number("warmup_ratio")
    if steps and 0 < steps < 1:
        steps, ratio = None, steps  # transformers 5: a share of the training
    text = ""
    if steps:
        text = quantity(steps, "step") if steps < 10**15 else ""
        if ratio:
            reader.warn_ignored(
                "warmup_ratio", f"{reader.tool} ignores `warmup_ratio` beside `warmup_steps`", "remove it"
            )
            reader.name("warmup_ratio", "`warmup_steps` is carried, as the tool does")
    elif ratio and ratio < 1:
        length = reader.whole_number("max_steps", least=-1)
        text = f"{value_text(round(ratio * 100, 8))}%"
        if length and length > 0:
            text = quantity(math.ceil(length * ratio), "step")  # transformers rounds up, and a share of a job does not
    elif ratio:
        reader.name("warmup_ratio", "it is a share of the training below 1")
        return ""
    for key, stated in (("warmup_steps", steps is not None or ratio), ("warmup_ratio", not steps)):
        if stated and text:
            reader.carry(key, f"train.lr_schedule.warmup = {text}")
        elif not text:
            reader.imply(key, "0 is no warm-up, as by default")
    return text


def read_lora(reader: KeyReader, keys: dict[str, str], targets: Sequence[str] = ("*_proj",)) -> None:
    """Reads an adapter whose arguments have these keys; `targets` are the dense layers of a file that names none."""
    arguments = {"rank": str(reader.whole_number(keys["rank"]) or 8)}
    alpha, dropout = reader.number(keys["alpha"]), reader.number(keys["dropout"])
    stacks = _patterns(reader, keys["parameters"]) if "parameters" in keys else []
    stacks = [name if "." in name else f"experts.{name}" for name in stacks]  # peft takes any parameter of this name
    patterns = [pattern for pattern in _patterns(reader, keys["targets"]) if pattern not in ("all", "all-linear")]
    arguments["targets"] = value_text([*(patterns or targets), *stacks])
    if alpha:
        arguments["alpha"] = value_text(float(alpha))
    if dropout and dropout < 1:
        arguments["dropout"] = value_text(dropout)
    reader.draft.set("model.adapter", CallDraft("lora", arguments).text(), keys["rank"])
    for name, key in keys.items():
        argument = "targets" if name == "parameters" else name
        text = f" = {arguments[argument]}" if argument in arguments else ""
        reader.carry(key, f"model.adapter.{argument}{text}")


def _patterns(reader: KeyReader, key: str) -> list[str]:
    value = reader.value(key)
    names = value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else []
    return [str(name).strip() for name in names if re.fullmatch(r"[\w.*-]{1,200}", str(name).strip())]


QUANTIZED_LOADS = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
_QUANTIZED = {
    "nf4": "torchao's nf4, whose scales differ from those of bitsandbytes in the last bits",
    "int8": "torchao's int8, multiplied in the job's precision; bitsandbytes multiplies in 8 bits, but for outliers",
}


def read_quantization(reader: KeyReader, stated: dict[str, str]) -> None:
    """Quantizes the frozen weights of the job's model, as `load_in_…` and the keys of `stated` ask for. Two kinds are a
    contradiction.
    """
    kinds = stated | {key: kind for key, kind in QUANTIZED_LOADS.items() if reader.flag(key)}
    for key in QUANTIZED_LOADS:
        if key not in kinds:
            reader.imply(key, "nothing is quantized, as by default")
    if not kinds:
        return
    key = next(iter(kinds))
    kind, weights = kinds[key], reader.draft.settings.get("model.weights")
    for other, its_kind in kinds.items():
        if its_kind != kind:
            message = f"`{key}` asks for weights in {kind}, and `{other}` in {its_kind}"
            reader.contradict(other, message, "set one of them", other=key)
        elif weights is None:
            reader.name(other, "`weights = pretrained(…, quantize = …)` needs a model")
        else:
            reader.carry(other, f"model.weights = pretrained(…, quantize = {kind}): {_QUANTIZED[kind]}")
    if weights is not None:
        reader.draft.set("model.weights", f"pretrained({weights.text}, quantize = {kind})", _QUANTIZED[kind])


def read_model(reader: KeyReader, key: str) -> None:
    """Reads the name or folder of a model of `transformers`, which a job reads from a folder."""
    name = reader.text(key)
    if not name:
        return
    folder = (
        name if os.path.isdir(name) or name.startswith((".", "/", "~")) else f"./{name.rstrip('/').rpartition('/')[2]}"
    )
    reader.draft.set(
        "model.network", f"transformers({quoted(folder)})", f"a folder that `save_pretrained` wrote: {name}"
    )
    reader.draft.set("model.weights", quoted(folder))
    reader.carry(key, f"model.network = transformers({quoted(folder)}), model.weights")


def set_token_source(reader: KeyReader, key: str, default: int | None = None) -> None:
    """Sets a source of tokens with the context length of this key, or with the tool's default."""
    context = reader.whole_number(key)
    if context is None and default and not reader.has(key):
        context = default
        reader.defaults.append(f"`{key.rpartition('.')[2]} = {default}`")
    hint = "name your data: `dslc tokens` makes it" + ("" if context else "; and its length")
    reader.draft.set("data.source", f'tokens("your_data/*.bin", context = {context or 1024})', hint)
    reader.carry(key, f"data.source.context = {context}")
