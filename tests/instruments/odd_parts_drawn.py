"""Jobs drawn at random over what public bug reports are about, by the parts of odd_parts.py.

Host randomness, tied weights by their second names, parameters that are stored in odd ways, blocks in dictionaries,
dicts and pairs over pipelines, frozen first blocks, weights of samples beside `data.test`, buffers, losses with
parameters, optimizers with `train()` and `eval()` or with a closure, modules that are used again, plain attributes,
samples that see each other, losses of `own()` that compare samples, masks with the classes first, exchanges; over a
tensor axis transformers whose projections are joined.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from helpers.paths import HELPERS

from instruments.own_networks_drawn import draw_plan, families

Blocks = dict[str, dict[str, str]]


def lay_out(folder: Path) -> None:
    """Writes what the jobs name."""
    shutil.copy(HELPERS / "odd_parts.py", folder)
    shutil.copy(HELPERS / "own_closures.py", folder)
    np.save(folder / "odd_weights.npy", np.arange(1.0, 51.0))


OPTIMIZERS = (
    *("sgd(lr = 0.05)", "sgd(lr = 0.05, momentum = 0.9)", "adam(lr = 1e-3)", "adamw(lr = 1e-3, weight_decay = 0.1)")
    * 2,
    *('python("odd_parts:Averaging", lr = 0.05)',) * 2,
    'python("own_closures:lbfgs", lr = 0.1, max_iter = 2)',
    'python("own_closures:Sam", lr = 0.02)',
)
EXCHANGES = (
    "fp16()",
    "bf16()",
    "powersgd(rank = 2)",
    "bytegrad()",
    "local_sgd(period = 2)",
    "diloco(period = 2)",
    "decentralized()",
    "low_precision_decentralized()",
    "async_average()",
    "async_average(interval = 1 ms, warmup = 2 steps)",
)


def draw(
    rng: random.Random, devices: dict[str, str], parallelism: dict[str, str], ranks: int, train: dict[str, str]
) -> Blocks:
    """Returns the blocks of a job on these devices, with `ranks` along its data axis."""

    def one(*choices: str) -> str:
        return rng.choice(choices)

    def chance(share: float) -> bool:
        return rng.random() < share

    named, tied, pair, depth = chance(0.3), chance(0.3), chance(0.25), rng.randint(1, 4)
    parts = [f"depth = {depth}"]
    split = parallelism.get("schedule") in ("zero_bubble", "zbv")
    parts += ['blocks = "dict"'] * chance(0.4) + ["tied = true"] * tied
    parts += ["again = true"] * chance(0.5 if split else 0.2)
    parts += [f'weight = "{one("transposed", "empty", "expanded", "orthogonal", "normed")}"'] * chance(0.35)
    parts += [f'norm = "{one("untracked", "tracked")}"'] * chance(0.2)
    parts += [f'path = "{one("one", "drop")}"'] * chance(0.2)
    parts += [f'buffer = "{one("maximum", "count")}"'] * chance(0.15) + ["table = true"] * chance(0.2)
    parts += ["keeps = true"] * chance(0.04) + ["mixes = true"] * chance(0.06) + ["double = true"] * chance(0.02)
    loss = 'python("odd_parts:margin")' if chance(0.06) else 'python("odd_parts:classified")'
    source = ["named = true"] * named + ["unseeded = true"] * chance(0.03)
    metrics = ""
    if pair:
        parts += ['output = "pair"']
    elif chance(0.15):
        parts, loss = [*parts, f'output = "{one("loss", "balanced", "balanced")}"'], "own()"
        source += ['form = "whole"']
    elif chance(0.2):
        parts, loss = [*parts, 'output = "map"'], one("cross_entropy()", 'python("odd_parts:of_masks")')
        source, metrics = [*source, 'form = "mask"'], "[loss, accuracy, iou()]"
    elif chance(0.1):
        loss = "cross_entropy()"
    arguments = "".join(f", {each}" for each in source)
    if chance(0.12) and "data" not in parallelism:
        parallelism = parallelism | {"gradients": one(*EXCHANGES)}
    blocks: Blocks = {
        "model": {"network": f'python("odd_parts:Odd", {", ".join(parts)})', "loss": loss},
        "data": {
            "source": f'python("odd_parts:Samples"{arguments})',
            "batch": str(ranks * int(parallelism.get("microbatches", "1")) * rng.randint(1, 3)),
        },
        "devices": devices | ({"threads": one("1", "2")} if chance(0.1) else {}),
        "parallelism": parallelism,
        "memory": {"recompute": one("full", "selective", "every(2)")} if chance(0.25) else {},
        "train": train | {"optimizer": one(*OPTIMIZERS)},
        "evaluate": {"metrics": metrics} if metrics and chance(0.7) else {},
        "checkpoint": {},
        "launch": {"timeout": "1 min"},
        "log": {"every": "1 step", "tensorboard": "false"},
    }
    if "tensor" in parallelism and chance(0.75):
        return blocks | _joined_attention(rng, blocks)
    name = one("back.weight", "mix.weight", "*.weight", "back.*") if tied else one("head.*", "blocks.*")
    if chance(0.3) and "Averaging" not in blocks["train"]["optimizer"]:
        blocks["train"]["groups"] = f'[group("{name}", lr = 0.01)]'
    if chance(0.3):
        blocks["train"]["no_decay"] = f'["{name}"]'
    if chance(0.2):
        blocks["model"]["freeze"] = one('["enter.*"]', '["enter.*", "blocks.*0.*"]', '["back.weight"]')
    if chance(0.5):
        blocks["data"]["validation"] = one("20%", "10%")
        blocks["evaluate"] |= {"start": "true"} if chance(0.3) else {}
    if chance(0.3):
        blocks["data"]["test"] = "10%"
    if chance(0.15):
        blocks["evaluate"]["training"] = "true"
    if chance(0.3):
        blocks["evaluate"]["every"] = one("1 step", "2 steps")
    if chance(0.3):
        weights = one('"odd_weights.npy"', 'python("odd_parts:weights")')
        blocks["data"]["sampler"] = one(f"weighted({weights})", 'by_length("odd_weights.npy", window = 2)')
    if "validation" in blocks["data"] or "test" in blocks["data"] or "training" in blocks["evaluate"]:
        network = blocks["model"]["network"]  # without running statistics an evaluation is not that of one process
        blocks["model"]["network"] = network.replace('"untracked"', '"tracked"')
    return blocks


def _joined_attention(rng: random.Random, blocks: Blocks) -> Blocks:
    """Returns blocks for a transformer that gives queries, keys and values by one layer, and its plan."""
    every = families(rng, (6,), (6, 11), tokens=True)
    family = next(family for family in every if "joined = true" in family.call)
    return {
        "model": {"network": family.call, "loss": "cross_entropy()"},
        "data": blocks["data"] | {"source": "synthetic(samples = 50, vocab = 11, context = 6)", "validation": "10%"},
        "parallelism": blocks["parallelism"] | {"tensor_plan": draw_plan(rng, family.groups) or "[]"},
        "evaluate": {"every": "2 steps"},
    }
