"""Rank programs made by hand, small ones, for tests of the runtime."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dslc.compiler.ir import program as p
from dslc.compiler.placement import layout
from dslc.compiler.placement.axes import AXES
from dslc.dsl.language.optimizers import torch_optimizer


def conv_model(width: int = 4) -> p.ModelStep:
    """Two convolutions with batch norm over 8x8 images, ten classes."""

    def conv(name: str, into: int, out: int) -> p.ModuleStep:
        arguments = {"in_channels": into, "out_channels": out, "kernel_size": 3, "padding": 1}
        return p.ModuleStep(name=name, kind="Conv2d", arguments=arguments, line="digits.plt:6:5")

    def norm(name: str, width: int) -> p.ModuleStep:
        return p.ModuleStep(name=name, kind=".BatchNorm2d", arguments={"num_features": width, "sync": True})

    pool = {"kernel_size": 2}
    classify = {"in_features": 2 * width * 4, "out_features": 10}
    layers = (
        conv("0", 1, width),
        norm("1", width),
        p.ModuleStep(name="2", kind="ReLU"),
        p.ModuleStep(name="3", kind="MaxPool2d", arguments=pool),
        conv("4", width, 2 * width),
        norm("5", 2 * width),
        p.ModuleStep(name="6", kind="ReLU"),
        p.ModuleStep(name="7", kind="MaxPool2d", arguments=pool),
        p.ModuleStep(name="8", kind="Flatten"),
        p.ModuleStep(name="9", kind="Linear", arguments=classify, line="digits.plt:8:18"),
    )
    inits = (
        *_init_steps("0.weight", (width, 1, 3, 3), 9),
        *_init_steps("0.bias", (width,), 9),
        *_norm("1", width),
        *_init_steps("4.weight", (2 * width, width, 3, 3), 9 * width),
        *_init_steps("4.bias", (2 * width,), 9 * width),
        *_norm("5", 2 * width),
        *_init_steps("9.weight", (10, 2 * width * 4), 2 * width * 4),
        *_init_steps("9.bias", (10,), 2 * width * 4),
    )
    return p.ModelStep(root=p.ModuleStep(name="", kind="Sequential", children=layers), inits=inits, seed=3)


def gpt_model(vocab: int = 32, width: int = 16, context: int = 8) -> p.ModelStep:
    """One transformer block over tokens, its head tied to the embedding."""
    linear = {"in_features": width, "out_features": width}
    attention = p.ModuleStep(
        name="attention",
        kind=".Attention",
        arguments={"head_dim": width // 2, "causal": True},
        children=(
            p.ModuleStep(name="qkv", kind="Linear", arguments=linear | {"out_features": 3 * width}),
            p.ModuleStep(name="output", kind="Linear", arguments=linear),
        ),
    )
    block = p.ModuleStep(
        name="2",
        kind=".TransformerBlock",
        children=(
            p.ModuleStep(name="attention_norm", kind="LayerNorm", arguments={"normalized_shape": width}),
            attention,
            p.ModuleStep(name="mlp_norm", kind="LayerNorm", arguments={"normalized_shape": width}),
            p.ModuleStep(name="mlp", kind="Linear", arguments=linear),
        ),
    )
    table = {"num_embeddings": vocab, "embedding_dim": width}
    head = {"in_features": width, "out_features": vocab, "bias": False}
    layers = (
        p.ModuleStep(name="0", kind="Embedding", arguments=table),
        p.ModuleStep(name="1", kind=".PositionalEmbedding", arguments={"context": context, "width": width}),
        block,
        p.ModuleStep(name="3", kind="Linear", arguments=head),
    )
    inits = (
        *_init_steps("0.weight", (vocab, width), width),
        *_init_steps("1.weight", (context, width), width),
        *_norm("2.attention_norm", width),
        *_init_steps("2.attention.qkv.weight", (3 * width, width), width),
        *_init_steps("2.attention.qkv.bias", (3 * width,), width),
        *_init_steps("2.attention.output.weight", (width, width), width),
        *_init_steps("2.attention.output.bias", (width,), width),
        *_norm("2.mlp_norm", width),
        *_init_steps("2.mlp.weight", (width, width), width),
        *_init_steps("2.mlp.bias", (width,), width),
    )
    root = p.ModuleStep(name="", kind="Sequential", children=layers)
    return p.ModelStep(root=root, inits=inits, ties=(("3.weight", "0.weight"),), seed=3)


def _init_steps(name: str, shape: tuple[int, ...], fan: int) -> tuple[p.InitStep, ...]:
    bound = 1 / math.sqrt(fan)
    return (p.InitStep(parameter=name, shape=shape, kind="uniform", a=-bound, b=bound),)


def _norm(name: str, width: int) -> tuple[p.InitStep, ...]:
    return (
        p.InitStep(parameter=f"{name}.weight", shape=(width,), kind="constant", a=1.0),
        p.InitStep(parameter=f"{name}.bias", shape=(width,), kind="constant", a=0.0),
    )


def python(function: str, folder: Path, **arguments: Any) -> p.PythonFunction:
    return p.PythonFunction(function=function, folder=str(folder), arguments=arguments, line="made.plt:3:13")


def images(folder: Path, train: int = 100, validation: int = 30, batch: int = 16, **changed: Any) -> p.DataStep:
    """Random 8x8 images of ten classes, which differ enough to be learnt."""
    random = np.random.default_rng(0)
    samples = train + validation
    labels = random.integers(0, 10, samples)
    pictures = random.normal(size=(samples, 1, 8, 8)) + random.normal(size=(10, 1, 8, 8))[labels]
    return _arrays(folder, pictures.astype(np.float32), labels, train, validation, batch, **changed)


def tokens(
    folder: Path, train: int = 40, validation: int = 12, batch: int = 8, ignored: float = 0.0, **changed: Any
) -> p.DataStep:
    """Random sequences of 8 tokens of 32, some targets of which are -100."""
    random = np.random.default_rng(0)
    text = random.integers(0, 32, (train + validation, 9))
    targets = np.where(random.random((train + validation, 8)) < ignored, -100, text[:, 1:])
    return _arrays(folder, text[:, :-1], targets, train, validation, batch, **changed)


def _arrays(
    folder: Path, inputs: Any, targets: Any, train: int, validation: int, batch: int, last: bool = False, **changed: Any
) -> p.DataStep:
    file = folder / "samples.npz"
    np.savez(file, x=inputs, y=targets)
    values: dict[str, Any] = {
        "source": "arrays",
        "arguments": {"file": str(file), "input": "x", "target": "y"},
        "train_samples": train,
        "validation_samples": validation,
        "split": "random",
        "seed": 5,
        "shuffle": True,
        "batch": batch,
        "last": train % batch if last else 0,
        "workers": 0,
        "line": "made.plt:7:12",
    }
    return p.DataStep(**(values | changed))


def optimizer_step(
    kind: str,
    lr: float = 0.05,
    *,
    no_decay: tuple[str, ...] = (),
    skipping: bool = False,
    **arguments: Any,
) -> p.OptimizerStep:
    """A class of `torch.optim`, as the compiler would write it."""
    codes: dict[str, Any] = {"state_": "8bit"} if kind.endswith("8bit") else {}
    declared = torch_optimizer(kind)(**arguments, **codes)
    if declared.fallback is not None:
        arguments |= {name: getattr(declared, name) for name in declared.record_names if name.startswith("adamw_")}
        arguments.setdefault("weight_decay", declared.fallback.weight_decay)  # type: ignore[attr-defined]
    return p.OptimizerStep(
        kind=kind,
        lr=lr,
        state=(*declared.counts, *declared.state),
        counts=declared.counts,
        fused=declared.fused_on(skipping=skipping),
        no_decay=no_decay,
        arguments=arguments,
        codes=declared.has_codes,
        split=declared.fallback is not None,
    )


def program(ranks: int, data: p.DataStep, model: p.ModelStep | None = None, **changed: Any) -> p.JobProgram:
    """A program for `ranks` processes on the CPU with momentum; a conv net if `model` is None."""
    steps = changed.get("steps", 8)
    python = model is not None and model.python is not None
    once = not python and changed.get("microbatches", 1) == 1
    gradients = changed.get("gradients", p.GradientStep(kind="none" if ranks == 1 else "ddp", static_graph=once))
    averages = ranks if gradients.kind in ("ddp", "zero1") else 1
    skipping = changed.get("on_nonfinite") == "skip" or changed.get("precision", p.PrecisionStep()).scaled
    values: dict[str, Any] = {
        "job": "made",
        "file": "made.plt",
        "plan_hash": "0",
        "world_size": ranks,
        "axes": dict.fromkeys(AXES, 1) | {"data": ranks},
        "processes": ranks,
        "device": "cpu",
        "backend": layout.CPU_BACKEND,
        "timeout": 60.0,
        "threads": 1,
        "model": model or conv_model(),
        "sync_batch_norm": ranks > 1,
        "loss": p.LossStep(kind="cross_entropy", line="made.plt:4:13"),
        "data": data,
        "microbatches": 1,
        "steps": steps,
        "steps_per_epoch": -(-data.train_samples // data.batch) if data.last else data.train_samples // data.batch,
        "optimizer": optimizer_step("SGD", skipping=skipping, momentum=0.9),
        "learning_rate": p.LearningRateStep(steps=steps),
        "clip": None,
        "precision": p.PrecisionStep(),
        "evaluate_every": 0,
        "metrics": (p.MetricStep(kind="loss", name="loss"), p.MetricStep(kind="accuracy", name="accuracy")),
        "log_every": 1,
        "tensorboard": False,
        "deterministic": False,
        "seed": 3,
    }
    return p.JobProgram(**(values | changed | {"gradients": replace(gradients, averages=averages)}))


def places(ranks: int) -> tuple[p.RankPlace, ...]:
    return tuple(
        p.RankPlace(
            rank=r,
            node=0,
            local_rank=r,
            coordinates=dict.fromkeys(AXES, 0) | {"data": r},
            data_rank=r,
            data_ranks=ranks,
        )
        for r in range(ranks)
    )
