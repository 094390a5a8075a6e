"""Expressions to values by kind, calls, params, suggestions, and fields without effect."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dslc.dsl.language import units
from dslc.dsl.language.calls import Bf16, EveryNthBlock, Free, Synthetic
from dslc.dsl.language.layers import Conv2d, Linear, MaxPool2d, PythonNetwork, Repeat
from dslc.dsl.language.lr_schedules import (
    CosineRestarts,
    Exponential,
    Multistep,
    OneCycle,
    PythonSchedule,
    WarmupCosine,
)
from dslc.dsl.language.optimizers import AdamW
from dslc.dsl.language.registry import Quantity, Range
from dslc.dsl.language.suggest import distance, nearest_choice
from dslc.dsl.meaning.arithmetic import Impossible, binary
from dslc.dsl.meaning.load import LoadResult, load_text
from dslc.dsl.meaning.resolve import PROMISES

BASE = """\
model { network = [linear(10)], loss = cross_entropy }
data { source = digits, batch = 8 }
train { epochs = 2, optimizer = sgd }
"""


def set_to(path: str, value: str, before: str = "") -> LoadResult:
    """Returns the job with one more entry."""
    block, name = path.split(".")
    text = BASE
    for line in text.splitlines():
        if line.startswith(block) and f"{name} = " in line:
            kept = [e for e in line[line.index("{") + 1 : -1].split(",") if not e.strip().startswith(name)]
            text = text.replace(line, f"{block} {{ {', '.join(kept)} }}")
    if name == "steps":
        text = text.replace("epochs = 2, ", "")
    return load_text(f"{before}{text}{block} {{ {name} = {value} }}\n")


def value_of(path: str, value: str, before: str = "") -> Any:
    loaded = set_to(path, value, before)
    assert not loaded.report.errors, [d.message for d in loaded.report]
    block, name = path.split(".")
    return getattr(getattr(loaded.job, block), "with_" if name == "with" else name)


def mistake(path: str, value: str, before: str = "") -> tuple[str, str, str]:
    """Returns code, message and help of the one mistake."""
    errors = set_to(path, value, before).report.errors
    assert len(errors) == 1, [d.message for d in errors]
    return errors[0].code, errors[0].message, errors[0].help


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("data.batch", "20_000", 20000),
        ("data.batch", "2 * (3 + 4) - 6 // 4", 13),
        ("data.batch", "64 / 4", 16),
        ("data.batch", "64 * 0.5", 32),
        ("data.batch", "2 ** 3 ** 2", 512),
        ("data.batch", "1GiB / 1MiB", 1024),
        ("data.batch", "10 epochs // 3 epochs", 3),
        ("data.batch", "-(-8)", 8),
        ("data.validation", "20%", 0.2),
        ("data.validation", "0.25", 0.25),
        ("data.validation", "1 % + 4%", 0.05),
        ("data.validation", "10% * 2", 0.2),
        ("data.shuffle", "false", False),
        ("data.last_batch", "keep", "keep"),
        ("devices.nodes", "1..4", Range(1, 4)),
        ("devices.nodes", "2", 2),
        ("devices.gpus", "[0, 2]", (0, 2)),
        ("devices.gpus", '"0, 2"', "0, 2"),
        ("devices.gpus", "all", "all"),
        ("devices.gpus", "-1", -1),
        ("devices.gpus", "free(4)", Free(count=4)),
        ("devices.kind", "a100_80g", "a100_80g"),
        ("devices.kind", '"h100"', "h100"),
        ("parallelism.schedule", "1f1b", "1f1b"),
        ("parallelism.stages", "[5, 7]", (5, 7)),
        ("parallelism.stages", "balanced", "balanced"),
        ("memory.recompute", "none", "none"),
        ("memory.recompute", "every(2)", EveryNthBlock(n=2)),
        ("memory.offload", "activations", ("activations",)),
        ("memory.offload", "[optimizer, parameters]", ("optimizer", "parameters")),
        ("memory.limit", "76GiB", 76 * 2**30),
        ("memory.limit", "1.5 kB", 1500),
        ("train.steps", "500", 500),
        ("train.steps", "5_000 steps", 5000),
        ("train.epochs", "3 epochs", 3),
        ("train.clip", "1", 1.0),
        ("train.precision", "bf16(level = O2)", Bf16(level="O2")),
        ("train.optimizer", "adamw(3e-4, betas = [0.9, 0.95])", AdamW(lr=3e-4, betas=(0.9, 0.95))),
        ("train.lr_schedule", "warmup_cosine(10%)", WarmupCosine(warmup=Quantity(0.1, "ratio"))),
        ("train.lr_schedule", "warmup_cosine(0.5 epochs)", WarmupCosine(warmup=Quantity(0.5, "epochs"))),
        ("train.lr_schedule", "exponential(0.9, 2 steps)", Exponential(factor=0.9, every=Quantity(2, "steps"))),
        ("train.lr_schedule", "multistep([3 epochs, 40 steps])", Multistep(
            milestones=(Quantity(3, "epochs"), Quantity(40, "steps"))
        )),
        ("train.lr_schedule", "one_cycle(rise = 5 steps)", OneCycle(rise=Quantity(5, "steps"))),
        ("train.lr_schedule", "cosine_restarts(2 epochs, 2)", CosineRestarts(every=Quantity(2, "epochs"), growth=2)),
        ("train.lr_schedule", 'python("m:f", power = 2)', PythonSchedule(function="m:f", arguments=(("power", 2),))),
        ("evaluate.every", "1 epoch", Quantity(1, "epochs")),
        ("checkpoint.every", "90s", Quantity(90.0, "time")),
        ("launch.timeout", "500ms", 0.5),
        ("model.network", "[conv2d(8, 5), max_pool2d(2),]", (Conv2d(channels=8, kernel=5), MaxPool2d(kernel=2))),
        ("model.network", "[repeat(2, [linear(4, bias = false)])]", (
            Repeat(count=2, layers=(Linear(features=4, bias=False),)),
        )),
        ("model.network", 'python("m.n:f", width = 2 * 3, names = ["a", none, [true]])', PythonNetwork(
            function="m.n:f", arguments=(("width", 6), ("names", ("a", None, (True,)))),
        )),
        ("data.source", "synthetic(shape = [3, 4], classes = 10)", Synthetic(shape=(3, 4), classes=10)),
    ],
)  # fmt: skip
def test_a_value_becomes_what_its_kind_says(path: str, text: str, value: Any) -> None:
    found = value_of(path, text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("path", "text", "code", "said"),
    [
        ("data.batch", "64.0", "E0121", "write `64`"),
        ("data.batch", "64.5", "E0121", "not 64.5"),
        ("data.batch", "64 / 3", "E0121", "not 21.33"),
        ("data.batch", "true", "E0121", "not a truth value"),
        ("data.batch", '"64"', "E0121", "write `64`, without quotes"),
        ("data.batch", "[64]", "E0121", "write `64`"),
        ("data.batch", "64MB", "E0122", "not bytes"),
        ("data.batch", "50%", "E0122", "not a ratio"),
        ("data.batch", "0", "E0125", "at least 1"),
        ("data.batch", "2 ** 200", "E0126", "too large"),
        ("data.batch", "9 ** 9 ** 9", "E0126", "too large"),
        ("data.batch", "1 / 0", "E0126", "divides by zero"),
        ("data.batch", "1 // 0.0", "E0126", "divides by zero"),
        ("data.batch", "0 ** -1", "E0126", "divides by zero"),
        ("data.batch", "(0 - 8) ** 0.5", "E0126", "no root"),
        ("data.batch", "2MB * 3MB", "E0127", "cannot be multiplied"),
        ("data.batch", "2 + 3MB", "E0127", "cannot be added"),
        ("data.batch", "2 / 3 steps", "E0127", "cannot be divided"),
        ("data.batch", "2 + true", "E0127", "not a truth value"),
        ("data.batch", '"a" + 1', "E0127", "not text"),
        ("data.batch", "2 * widht", "E0120", "no param `widht`"),
        ("data.batch", "64x", "E0123", "no unit `x`"),
        ("train.steps", "10k", "E0123", "write `10_000`"),
        ("devices.gpus", "8xA100", "E0123", "`devices { gpus = 8, kind = a100 }`"),
        ("data.validation", "1.0", "E0125", "below 1"),
        ("launch.timeout", "1e20s", "E0125", "of at most 1_000_000_000"),
        ("data.validation", "20", "E0125", "write `20%`"),
        ("data.validation", "2 steps", "E0122", "not steps"),
        ("data.shuffle", "1", "E0121", "write `true`"),
        ("data.shuffle", "yes", "E0120", "write `true`"),
        ("data.last_batch", "kep", "E0120", "did you mean `keep`?"),
        ("data.last_batch", '"keep"', "E0121", "write `keep`"),
        ("devices.nodes", "4..1", "E0137", "write `1..4`"),
        ("devices.nodes", "0..4", "E0125", "at least 1"),
        ("devices.nodes", "1.0..4", "E0121", "write `1`"),
        ("devices.gpus", '"two"', "E0135", "numbers of GPUs"),
        ("devices.gpus", "al", "E0120", "did you mean `all`?"),
        ("parallelism.schedule", "1f1", "E0120", "did you mean `1f1b`?"),
        ("parallelism.schedule", "f1b1", "E0120", "1f1b"),
        ("parallelism.schedule", "gpipe(2)", "E0121", "write `gpipe`"),
        ("parallelism.zero", "expert_tensor", "E0108", "reserved"),
        ("memory.limit", "76gib", "E0123", "did you mean `GiB`?"),
        ("memory.limit", "76 Gib", "E0123", "did you mean `GiB`?"),
        ("memory.limit", "76", "E0124", "76GiB"),
        ("memory.limit", "10min", "E0122", "not time"),
        ("memory.recompute", "full(2)", "E0121", "write `full`"),
        ("memory.recompute", "every", "E0109", "needs `n`"),
        ("train.steps", "4.5", "E0121", "whole steps"),
        ("train.steps", "2 epochs", "E0122", "not epochs"),
        ("train.clip", "1e400", "E0007", "not a number"),
        ("train.clip", "1e308 * 10", "E0126", "too large"),
        ("train.no_decay", '"*.bias"', "E0121", 'write `["*.bias"]`'),
        ("train.lr_schedule", "warmup_cosine(0.1)", "E0124", "write `10%`"),
        ("train.lr_schedule", "warmup_cosine(100)", "E0124", "write `100 steps`"),
        ("train.optimizer", "adm(1)", "E0130", "did you mean `adam`?"),
        ("train.optimizer", "mse", "E0130", "`mse` is a loss"),
        ("train.optimizer", "adam(lr = 1, betas = [0.9])", "E0136", "takes 2 values, not 1"),
        ("train.optimizer", "adam(0.1, [0.9, 1.0])", "E0125", "below 1"),
        ("train.optimizer", "adam(0.1, lr = 0.1)", "E0133", "`lr` twice"),
        ("train.optimizer", "adam(weight_dcay = 1)", "E0131", "did you mean `weight_decay`?"),
        ("train.optimizer", "adam(learning_rate = 1)", "E0131", "did you mean `lr`?"),
        ("train.optimizer", "adam(momentum = 1)", "E0131", "`sgd`, `muon` or `rmsprop` has one"),
        ("train.scale_lr", "linear(2, 3)", "E0134", "1 argument at most"),
        ("evaluate.every", "5", "E0124", "write `5 steps`"),
        ("evaluate.metrics", "accuracy", "E0121", "write `[accuracy]`"),
        ("evaluate.metrics", "[]", "E0136", "at least 1"),
        ("model.network", "[lineer(3)]", "E0130", "did you mean `linear`?"),
        ("model.network", "linear(3)", "E0130", "a network is a list of layers"),
        ("model.network", "[linear]", "E0109", "needs `features`"),
        ("model.network", 'python("f")', "E0135", "module:function"),
        ("model.network", 'python("m:f", 3)', "E0134", "must be given by name"),
        ("model.network", 'python("m:f", a = b)', "E0120", 'write `"b"` if it is text'),
        ("model.network", 'python("m:f", a = f(1))', "E0121", "not the call `f(…)`"),
        ("model.network", "resnet(20)", "E0125", "18, 34, 50, 101 or 152"),
        ("model.weights", '""', "E0135", "path"),
        ("data.source", "synthetic", "E0109", "`shape` or `vocab`"),
        ("data.source", "synthetic(shape = [1], vocab = 9)", "E0105", "exclude each other"),
    ],
)
def test_what_a_field_does_not_take(path: str, text: str, code: str, said: str) -> None:
    found, message, help = mistake(path, text)
    assert found == code
    assert said in f"{message} {help}" or said in str([d.label for d in set_to(path, text).report])


def test_every_mistake_is_reported_and_only_causes() -> None:
    text = BASE.replace("linear(10)", "linear(x), linear(y), linear(10, kernel = 3)")
    loaded = load_text(text + "devices { gpus = x }")
    assert [d.code for d in loaded.report] == ["E0120", "E0120", "E0131", "E0120"]
    assert loaded.job is None and loaded.broken == {
        "model.network", "model.network[0].features", "model.network[1].features", "devices.gpus",
    }  # fmt: skip


def test_an_optional_value_that_is_wrong_leaves_a_job_without_it() -> None:
    loaded = set_to("data.workers", "many")
    assert loaded.job is not None and loaded.job.data.workers == 0 and loaded.broken == {"data.workers"}


def test_values_know_where_they_stand() -> None:
    job = load_text(BASE + "launch {\n  restarts = 3\n  with = slurm(time = 2h)\n}").job
    assert job is not None
    assert str(job.launch.span) == "job.plt:4:1" and str(job.launch.value_span("restarts")) == "job.plt:5:14"
    assert str(job.launch.name_span("with_")) == "job.plt:6:3" and job.launch.with_.value_span(
        "time"
    ) != job.launch.value_span("with_")
    assert job.memory.span is None and not job.launch.is_set("timeout")
    assert str(job.launch.value_span("timeout")) == "job.plt:4:1", "a default points at the block's header"
    assert job.launch == replace(job.launch, span=None, places={})
    with pytest.raises(FrozenInstanceError):
        job.launch.restarts = 4  # type: ignore[misc]


# ----------------------------------------------------------------------------------------------------------- params


def test_a_param_stands_for_its_expression() -> None:
    text = """\
param depth = 2
param wide = depth * 2
param way = full
param rule = adamw(lr = 1 / (wide * 1.0))
param layers = [linear(wide), linear(10)]
param pace = depth * 5 steps
"""
    job = load_text(
        text + BASE.replace("[linear(10)]", "layers").replace("sgd", "rule")
        + "memory { recompute = way }\nlog { every = pace }"
    ).job  # fmt: skip
    assert job is not None
    assert job.model.network == (Linear(features=4), Linear(features=10))
    assert job.train.optimizer == AdamW(lr=0.25)
    assert job.memory.recompute == "full" and job.log.every == Quantity(10, "steps")


def test_a_mistake_in_a_param_points_at_it_and_names_its_use() -> None:
    (found,) = set_to("data.batch", "size", "param size = 2.5\n").report
    assert (found.code, str(found.span), str(found.notes[0].span)) == ("E0121", "job.plt:1:14", "job.plt:5:16")


def test_a_param_that_hides_a_word_is_a_warning() -> None:
    loaded = set_to("data.last_batch", "keep", "param keep = drop\n")
    assert [d.code for d in loaded.report] == ["W0102"] and loaded.job and loaded.job.data.last_batch == "drop"
    assert not set_to("parallelism.data", "data", "param data = 1\n").report, "a count is no word"
    assert not set_to("data.batch", "batch", "param batch = 1\n").report, "names left of `=` are never params"


def test_circles_of_params_are_reported_once() -> None:
    loaded = set_to("data.batch", "a + b", "param a = b\nparam b = 2 * a\nparam c = c\n")
    assert sorted(d.code for d in loaded.report) == ["E0128", "E0128"]
    assert "`a` -> `b` -> `a`" in next(iter(loaded.report)).message


def test_params_without_a_value_and_without_a_use() -> None:
    loaded = load_text("param a\nparam b = 1\n" + BASE)
    assert [(d.code, str(d.span)) for d in loaded.report] == [("E0129", "job.plt:1:7"), ("W0101", "job.plt:2:7")]
    assert [d.code for d in load_text("param a\n" + BASE, settings=["a=1"]).report] == ["W0101"]


# ------------------------------------------------------------------------------------------------------ suggestions


@pytest.mark.parametrize(
    ("block", "name", "help"),
    [
        ("train", "lr", "`optimizer = adamw(lr = …)`"),
        ("train", "learning_rate", "`optimizer = adamw(lr = …)`"),
        ("train", "warmup_steps", "`lr_schedule = warmup_cosine(warmup = …)`"),
        ("train", "batch_size", "`data { batch = … }`"),
        ("train", "gradient_clip_val", "did you mean `clip`?"),
        ("train", "max_epochs", "did you mean `epochs`?"),
        ("train", "accumulate_grad_batches", "`parallelism { microbatches = … }`"),
        ("train", "stps", "did you mean `steps`?"),
        ("train", "workers", "`workers` belongs to `data`"),
        ("data", "num_workers", "did you mean `workers`?"),
        ("data", "bacth", "did you mean `batch`?"),
        ("data", "optimiser", "did you mean `train.optimizer`?"),
        ("devices", "gpu", "did you mean `gpus`?"),
        ("devices", "devices", "did you mean `gpus`?"),
        ("devices", "accelerator", "did you mean `gpus`?"),
        ("parallelism", "zero_stage", "did you mean `zero`?"),
        ("parallelism", "auto", "write `parallelism = auto`"),
        ("memory", "gradient_checkpointing", "did you mean `recompute`?"),
        ("checkpoint", "qqqqq", "`checkpoint` has `every`"),
        ("launch", "with_", "did you mean `with`?"),
    ],
)
def test_a_field_that_is_none_is_led_to_the_one_that_is(block: str, name: str, help: str) -> None:
    found = next(d for d in load_text(f"{BASE}{block} {{ {name} = 1 }}").report if d.code == "E0107")
    assert help in found.help


@pytest.mark.parametrize(
    ("name", "help"), [("trian", "`train`"), ("optimizer", "`train { optimizer = … }`"), ("trainer", "`train`")]
)
def test_a_block_that_is_none_is_led_to_the_one_that_is(name: str, help: str) -> None:
    (found,) = load_text(f"{BASE}{name} {{ }}").report
    assert found.code == "E0106" and help in found.help


@given(st.text("abcde_", max_size=7), st.text("abcde_", max_size=7))
def test_the_distance_of_words_is_a_distance(one: str, other: str) -> None:
    assert distance(one, other, 99) == distance(other, one, 99)
    assert (distance(one, other, 99) == 0) is (one == other)
    assert abs(len(one) - len(other)) <= distance(one, other, 99) <= max(len(one), len(other))
    assert distance(one, other) == min(distance(one, other, 99), 4)


def test_near_words() -> None:
    assert nearest_choice("bacth", ["batch", "bath"]) == "batch"
    assert nearest_choice("LR-Schedule", ["lr_schedule"]) == "lr_schedule"
    assert nearest_choice("x", ["y", "xy"]) is None and nearest_choice("zzz", ["batch"]) is None


# ------------------------------------------------------------------------------------------------------- arithmetic

amounts = st.one_of(
    st.integers(-10, 10), st.floats(allow_nan=False),
    st.builds(Quantity, st.integers(-10, 10), st.sampled_from(["bytes", "steps"])),
)  # fmt: skip


@given(st.sampled_from(["+", "-", "*", "/", "//", "**"]), amounts, amounts)
def test_arithmetic_gives_a_number_or_a_reason(operator: str, left: Any, right: Any) -> None:
    try:
        found = binary(operator, left, right)
    except Impossible:
        return
    dimensions = {a.dimension for a in (left, right) if isinstance(a, Quantity)}
    if isinstance(found, Quantity):
        assert {found.dimension} == dimensions
    else:
        assert not dimensions or (operator in ("/", "//") and len(dimensions) == 1)


@given(
    st.integers(0, 2**60) | st.floats(0, 1e12) | st.floats(0, 1.7e308),
    st.sampled_from(["peak_memory", "step_time", "bubble"]),
)
@example(1e305, "step_time")
@example(1e308, "bubble")
def test_a_quantity_is_written_so_that_it_reads_back(value: int | float, name: str) -> None:
    dimension = PROMISES[name]
    assert dimension is not None
    value = min(int(value), units.LARGEST) if dimension == "bytes" else float(value)
    loaded = load_text(f"{BASE}expect {{ {name} < {units.write(value, dimension)} }}")
    assert not loaded.report and loaded.job is not None
    assert loaded.job.expect[0].value == value


# ---------------------------------------------------------------------------------------------------------- effects


@pytest.mark.parametrize(
    ("entries", "path"),
    [
        ("parallelism { virtual_stages = 2 }", "parallelism.virtual_stages"),
        ("parallelism { stages = [1, 1] }", "parallelism.stages"),
        ("parallelism { sequence = false }", "parallelism.sequence"),
        ('parallelism { tensor_plan = ["*: column"] }', "parallelism.tensor_plan"),
        ("parallelism { replicas = 2 }", "parallelism.replicas"),
        ("parallelism { data = 1, gradients = fp16 }", "parallelism.gradients"),
        ("checkpoint { keep = 3 }", "checkpoint.keep"),
        ('checkpoint { dir = "x" }', "checkpoint.dir"),
        ("evaluate { every = 1 epoch }", "evaluate.every"),
        ('train { no_decay = ["*.bias"] }', "train.no_decay"),
        ("train { lr_schedule = step(every = 5 epochs) }", "train.lr_schedule"),
        ("memory { offload = [optimizer] }", "memory.offload"),
    ],
)
def test_a_field_without_effect_is_a_warning(entries: str, path: str) -> None:
    (found,) = load_text(BASE + entries).report
    assert found.code == "W0103" and f"`{path}` has no effect" in found.message
    assert found.span is not None and found.span.text() in path


@pytest.mark.parametrize(
    "entries",
    [
        "parallelism { schedule = 1f1b, stages = balanced, replicas = 1, data = 1, zero = 0 }",
        "parallelism { pipeline = 2, schedule = gpipe }",
        "parallelism { tensor_plan = [] }",
        "checkpoint { keep = 2, asynchronous = true }",
        'checkpoint { resume = auto, dir = "x" }',
        "evaluate { metrics = [loss] }",
        "devices { gpus = 1 }\nmemory { offload = [optimizer] }",
        "parallelism { pipeline = x, schedule = gpipe }",
    ],
)
def test_what_has_an_effect_or_is_the_default_is_none(entries: str) -> None:
    assert not [d for d in load_text(BASE + entries).report if d.severity == "warning"]
