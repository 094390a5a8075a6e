"""Rules, and the choice of the engine, for frozen parameters, offload, recomputation and initial weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made_jobs import gpt_model, make_job
from safetensors.torch import save_file

from dslc.compiler.facts.weights_file import Unreadable, entries, files_of
from dslc.compiler.ir.facts import Facts, TensorEntry
from dslc.compiler.placement.sharding import optimizer_groups, sharding_of, trained
from dslc.compiler.rules.analyse import analyse
from dslc.compiler.rules.analysis import Analysis
from dslc.dsl.diagnostics import Diagnostic, Report
from dslc.dsl.language import calls as c
from dslc.dsl.language import optimizers as o
from dslc.dsl.language.blocks import DevicesSpec, MemorySpec, ModelSpec, ParallelismSpec, TrainSpec
from dslc.dsl.language.layers import BatchNorm, Conv2d, Flatten, Linear
from dslc.dsl.meaning.load import load_text

GPT = """
model { network = gpt(layers = 1, width = 8, heads = 1, context = 8, vocab = 256), loss = cross_entropy() }
data { source = stdlib(), batch = 4 }
devices { cpus = 1 }
train { steps = 8, optimizer = sgd(lr = 0.1) }
"""


def looked_at(**blocks: Any) -> tuple[Analysis | None, list[Diagnostic]]:
    report = Report()
    return report.collect(analyse(make_job(**blocks), Facts())), report.found


def codes(**blocks: Any) -> list[str]:
    return [diagnostic.code for diagnostic in looked_at(**blocks)[1]]


def gpt(**fields: Any) -> dict[str, Any]:
    data = replace(make_job().data, source=c.Stdlib(), validation=0.0)
    return {"model": replace(gpt_model(tie=True), **fields), "data": data}


# ------------------------------------------------------------------------------------------------ frozen, no decay


def test_what_a_pattern_may_say() -> None:
    for pattern in ("embedding.weight", "*.bias", "blocks.[02].*", "head.weight", "*ln*", "blocks.?.mlp.up.weight"):
        found = codes(**gpt(freeze=(pattern,)))
        assert found == (["E0710"] if pattern == "*ln*" else []), pattern


def test_a_tied_weight_is_frozen_by_either_name() -> None:
    for name in ("embedding.weight", "head.weight"):
        analysis, found = looked_at(**gpt(freeze=(name,)))
        assert analysis is not None and analysis.model is not None and not found
        everything = {q.name for layer in analysis.model.layers for q in layer.parameters if q.tied_to is None}
        assert everything - trained(analysis.job, analysis.model) == {"embedding.weight"}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    (
        ("blocks.*.mpl.*", "blocks.*.mlp.*"),
        ("blocks.0.atention.qkv.weight", "blocks.0.attention.qkv.weight"),
        ("*.wieght", "*.weight"),
    ),
)
def test_near_patterns_are_suggested(pattern: str, meant: str) -> None:
    (diagnostic,) = looked_at(**gpt(freeze=(pattern,)))[1]
    assert diagnostic.code == "E0710" and diagnostic.help == f"did you mean `{meant}`?"


def test_nothing_left_to_train_and_no_decay_of_what_does_not_train() -> None:
    assert codes(**gpt(freeze=("*",))) == ["E0711"]
    adamw: dict[str, Any] = {"steps": 10, "optimizer": o.AdamW()}
    assert codes(**gpt(freeze=("*.bias",)), train=TrainSpec(no_decay=("*.bias",), **adamw)) == ["W0103"]
    assert codes(**gpt(freeze=("*.bias",)), train=TrainSpec(no_decay=("*.weight",), **adamw)) == []
    for frozen in (("embedding.*",), ("head.*",)):
        for field in ({"no_decay": ("head.weight",)}, {"groups": (o.Group(parameters=("head.*",), lr=0.1),)}):
            assert codes(**gpt(freeze=frozen), train=TrainSpec(**field, **adamw)) == ["W0103"]


def test_arguments_of_warm_ups_that_there_are_not() -> None:
    for text, found in (
        ("train.lr_schedule=warmup_linear(from = 0)", ["W0103"]),
        ("train.lr_schedule=warmup_linear(warmup = 2 steps, from = 0)", []),
        ("train.ema=ema(0.9, inv_gamma = 2, min_decay = 0.1)", ["W0103", "W0103"]),
        ("train.ema=ema(0.9, power = 2/3, inv_gamma = 2)", []),
    ):
        loaded, report = load_text(GPT, settings=[text]), Report()
        assert loaded.job is not None
        report.collect(analyse(loaded.job, Facts()))
        assert [d.code for d in report.found] == found, text


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        ((("head.*",), ("embedding.*",)), ["W0660"]),
        ((("blocks.*",), ("*.bias", "head.*"), ("embed*",)), ["W0660"]),
        ((("*.weight",), ("head.*",)), []),  # the first is of both names
        ((("head.*", "embedding.*"),), []),
    ],
)
def test_a_tied_weight_by_its_second_name(patterns: tuple[tuple[str, ...], ...], found: list[str]) -> None:
    """Patterns of any name are of the weight; two groups of two names are one too many."""
    groups = tuple(o.Group(parameters=each, lr=0.1) for each in patterns)
    train = TrainSpec(steps=10, optimizer=o.AdamW(), groups=groups)
    assert codes(**gpt(), train=train) == found
    analysis, _ = looked_at(**gpt(), train=train)
    assert analysis is not None and analysis.model is not None
    (of,) = (
        n
        for n, each in enumerate(optimizer_groups(analysis.job, analysis.model, frozenset(["embedding.weight"])))
        if each
    )
    assert of // 4 == next(n for n, each in enumerate(patterns, 1) if any(p in ("head.*", "*.weight") for p in each))
    spared = replace(train, groups=(), no_decay=("head.weight",))
    assert codes(**gpt(), train=spared) == []


# ------------------------------------------------------------------------------------------------ weights of a file


LAYERS = (Conv2d(channels=2, kernel=3), BatchNorm(), Flatten(), Linear(features=10))
SHAPES: dict[str, tuple[int, ...]] = {
    "0.weight": (2, 1, 3, 3),
    "0.bias": (2,),
    "1.weight": (2,),
    "1.bias": (2,),
    "1.running_mean": (2,),
    "1.running_var": (2,),
    "1.num_batches_tracked": (),
    "3.weight": (10, 72),
    "3.bias": (10,),
}


def of_file(path: Path) -> list[Diagnostic]:
    return looked_at(model=ModelSpec(network=LAYERS, loss=c.CrossEntropy(), weights=str(path)))[1]


def tensors() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.float32 if shape else torch.int64) for name, shape in SHAPES.items()}


def test_a_file_that_fits(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "weights.safetensors")
    assert of_file(tmp_path) == of_file(tmp_path / "weights.safetensors") == []
    found = entries(files_of(str(tmp_path)).path)
    assert {name: entry.shape for name, entry in found.items()} == SHAPES
    assert found["1.num_batches_tracked"] == TensorEntry(dtype="I64", shape=())
    save_file({name: tensor.half() for name, tensor in tensors().items()}, tmp_path / "half.safetensors")
    assert of_file(tmp_path / "half.safetensors") == []


@pytest.mark.parametrize(
    ("changed", "note"),
    (
        ({"3.bias": None, "1.running_var": None}, "the file lacks `3.bias`, `1.running_var`"),
        ({"4.weight": torch.zeros(3)}, "the file has besides `4.weight`"),
        (
            {"3.weight": torch.zeros(9, 72)},
            "the file has unlike tensors: `3.weight` is [9, 72] there and [10, 72] here",
        ),
        ({"0.bias": torch.zeros(2, dtype=torch.int8)}, "the file has unlike tensors: `0.bias` is I8"),
    ),
)
def test_a_file_that_does_not_fit(changed: dict[str, Any], note: str, tmp_path: Path) -> None:
    kept = {name: tensor for name, tensor in (tensors() | changed).items() if tensor is not None}
    save_file(kept, tmp_path / "weights.safetensors")
    (diagnostic,) = of_file(tmp_path)
    assert diagnostic.code == "E0713" and [each.message for each in diagnostic.notes] == [note]


def test_what_is_missing_or_broken_is_a_warning_until_the_run(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "whole.safetensors")
    data = (tmp_path / "whole.safetensors").read_bytes()
    for name, content in (("cut", data[:-4]), ("short", data[:20]), ("text", b"no weights at all"), ("empty", b"")):
        (tmp_path / f"{name}.safetensors").write_bytes(content)
        with pytest.raises(Unreadable):
            entries(str(tmp_path / f"{name}.safetensors"))
    for path in ("cut.safetensors", "text.safetensors", "absent.safetensors", "absent.pt", ""):
        (diagnostic,) = of_file(tmp_path / path)
        assert diagnostic.code == "W0712" and diagnostic.for_run().code == "E0712"
    torch.save({}, tmp_path / "weights.pt")
    assert of_file(tmp_path / "weights.pt") == []


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("recompute", ("full", "selective", c.EveryNthBlock(n=2)))
def test_recomputation_of_nothing(recompute: Any) -> None:
    memory = MemorySpec(recompute=recompute)
    assert codes(memory=memory) == ["W0714"]
    assert codes(memory=memory, **gpt()) == []


BF16, FP16, CLIP = {"precision": c.Bf16()}, {"precision": c.Fp16()}, {"clip": 1.0}


@pytest.mark.parametrize(
    ("offload", "gpus", "train", "expected"),
    (
        (("optimizer",), 1, BF16, []),
        (("optimizer",), 2, {}, ["E0716"]),
        (("optimizer",), 2, CLIP, ["E0716", "E0716"]),
        (("optimizer",), 1, {"precision": c.Bf16(level="O2")}, ["E0716"]),
        (("optimizer",), 1, FP16, ["E0717"]),
        (("parameters",), 1, {}, ["E0715"]),
        (("optimizer", "parameters"), 2, CLIP, []),
        (("optimizer", "parameters"), 2, FP16, ["E0717"]),
        (("activations",), 2, FP16 | CLIP, []),
    ),
)
def test_what_can_be_moved_to_the_host(
    offload: tuple[str, ...], gpus: int, train: dict[str, Any], expected: list[str]
) -> None:
    blocks = {
        "memory": MemorySpec(offload=offload),
        "train": TrainSpec(steps=10, optimizer=o.AdamW(), **train),
        "devices": DevicesSpec(gpus=gpus),
    }
    assert [code for code in codes(**blocks, **gpt()) if code.startswith("E")] == expected


ALONE, BOTH = ("optimizer",), ("optimizer", "parameters")


@pytest.mark.parametrize(
    ("offload", "parallelism", "tie", "expected"),
    (
        (ALONE, {"schedule": "1f1b"}, False, []),
        (ALONE, {"schedule": "1f1b"}, True, ["E0716"]),  # two stages add up what they have in common
        (ALONE, {"schedule": "zbv"}, True, ["E0716"]),  # one rank has both of them, but torch says nothing
        (ALONE, {"schedule": "1f1b", "tensor": 2}, False, ["E0716"]),
        (BOTH, {"schedule": "zbv", "data": 2, "zero": 2}, True, []),
        (BOTH, {"schedule": "zbv", "data": 2, "zero": 3}, True, ["E0430"]),
        (BOTH, {"schedule": "1f1b", "data": 2, "zero": 3, "tensor": 2}, True, []),
        (("activations",), {"schedule": "zero_bubble"}, True, []),
    ),
)
def test_what_can_be_moved_beside_a_pipeline(
    offload: tuple[str, ...], parallelism: dict[str, Any], tie: bool, expected: list[str]
) -> None:
    axes = {"pipeline": 2, "microbatches": 4, **parallelism}
    ranks = 2 * axes.get("data", 1) * axes.get("tensor", 1)
    blocks = gpt()
    blocks["model"] = gpt_model(tie=tie)
    analysis, found = looked_at(
        memory=MemorySpec(offload=offload),
        train=TrainSpec(steps=10, optimizer=o.AdamW()),
        devices=DevicesSpec(gpus=ranks),
        parallelism=ParallelismSpec(**axes),
        **blocks,
    )
    assert [diagnostic.code for diagnostic in found if diagnostic.severity == "error"] == expected
    if offload == BOTH and not expected:
        # Nothing is freed between the halves of a backward pass.
        assert analysis is not None
        assert sharding_of(analysis.job, analysis.layout).reshard == (parallelism["schedule"] == "1f1b")


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
@pytest.mark.parametrize("ranks", (1, 2))
def test_offloaded_parameters_are_let_go_after_use(ranks: int, zero: int) -> None:
    blocks = {
        "memory": MemorySpec(offload=("optimizer", "parameters")),
        "parallelism": ParallelismSpec(zero=zero),
        **gpt(),
    }
    analysis, _ = looked_at(devices=DevicesSpec(gpus=ranks), **blocks)
    assert analysis is not None
    sharding = sharding_of(analysis.job, analysis.layout)
    assert sharding.engine == "fsdp" and sharding.reshard
    assert (sharding.replicas, sharding.shards) == ((ranks, 1) if zero == 0 else (1, ranks))
    analysis, _ = looked_at(devices=DevicesSpec(cpus=ranks), **blocks)
    assert analysis is not None
    assert sharding_of(analysis.job, analysis.layout).engine != "fsdp" or (ranks, zero) in ((2, 2), (2, 3))
