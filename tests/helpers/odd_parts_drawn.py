"""Jobs drawn at random over what public bug reports are about, by the parts of odd_parts.py.

Host randomness, tied weights by their second names, parameters that are stored in odd ways, blocks in dictionaries,
dicts and pairs over pipelines, frozen first blocks, weights of samples beside `data.test`, buffers, losses with
parameters, optimizers with `train()` and `eval()`, modules that are used again.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np

from helpers.paths import HELPERS

Blocks = dict[str, dict[str, str]]


def lay_out(folder: Path) -> None:
    """Writes what the jobs name."""
    shutil.copy(HELPERS / "odd_parts.py", folder)
    np.save(folder / "odd_weights.npy", np.arange(1.0, 51.0))


def draw(rng: random.Random, devices: dict[str, str], parallelism: dict[str, str], ranks: int) -> Blocks:
    """Returns the blocks of a job on these devices, with `ranks` along its data axis."""

    def one(*choices: str) -> str:
        return rng.choice(choices)

    def chance(share: float) -> bool:
        return rng.random() < share

    named, tied, pair, depth = chance(0.3), chance(0.3), chance(0.25), rng.randint(1, 4)
    parts = [f"depth = {depth}"]
    parts += ['blocks = "dict"'] * chance(0.4) + ["tied = true"] * tied + ["again = true"] * chance(0.2)
    parts += [f'weight = "{one("transposed", "empty", "expanded", "orthogonal", "normed")}"'] * chance(0.35)
    parts += [f'norm = "{one("untracked", "tracked")}"'] * chance(0.2) + ['output = "pair"'] * pair
    parts += [f'path = "{one("one", "drop")}"'] * chance(0.2)
    parts += [f'buffer = "{one("maximum", "count")}"'] * chance(0.15)
    loss = 'python("odd_parts:margin")' if chance(0.06) else 'python("odd_parts:classified")'
    blocks: Blocks = {
        "model": {"network": f'python("odd_parts:Odd", {", ".join(parts)})', "loss": loss},
        "data": {
            "source": f'python("odd_parts:Samples"{", named = true" if named else ""})',
            "batch": str(ranks * int(parallelism.get("microbatches", "1")) * rng.randint(1, 3)),
        },
        "devices": devices,
        "parallelism": parallelism,
        "memory": {"recompute": one("full", "selective", "every(2)")} if chance(0.25) else {},
        "train": {
            "optimizer": one("sgd(lr = 0.05)", "sgd(lr = 0.05, momentum = 0.9)", "adam(lr = 1e-3)",
                             "adamw(lr = 1e-3, weight_decay = 0.1)", 'python("odd_parts:Averaging", lr = 0.05)'),
            "steps": str(rng.randint(3, 5)),
        },
        "evaluate": {},
        "checkpoint": {},
        "launch": {"timeout": "1 min"},
        "log": {"every": "1 step", "tensorboard": "false"},
    }  # fmt: skip
    name = one("back.weight", "mix.weight", "*.weight", "back.*") if tied else one("head.*", "blocks.*")
    if chance(0.3) and "Averaging" not in blocks["train"]["optimizer"]:
        blocks["train"]["groups"] = f'[group("{name}", lr = 0.01)]'
    if chance(0.3):
        blocks["train"]["no_decay"] = f'["{name}"]'
    if chance(0.2):
        blocks["model"]["freeze"] = one('["enter.*"]', '["enter.*", "blocks.*0.*"]', '["back.weight"]')
    if chance(0.5):
        blocks["data"]["validation"] = one("20%", "10%")
        blocks["evaluate"] |= {"start": "true"} if chance(0.2) else {}
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
