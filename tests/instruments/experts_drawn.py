"""Puts mixtures of experts into the networks of drawn jobs, and the expert axis into their plans."""

from __future__ import annotations

import random
import re

EXPERTS = 0.5  # the share of jobs with experts, of those whose network can have some
_AXIS = 0.8  # the share of these with an expert axis, where the data axis may have 2 ranks or more
_WIDE = r"embedding\((?:patch = \d, )?width = (?:8|16)\)|linear\(8, bias = (?:true|false)\)"  # layers before experts
_PATTERNS = ("*experts*", "*.gate.weight", "*down_proj", "*shared_experts*")
_ADAPTED = ("q_proj", "v_proj", "o_proj", "lm_head")

Blocks = dict[str, dict[str, str]]


def draw_experts(rng: random.Random, blocks: Blocks, share: float = EXPERTS) -> bool:
    """Puts experts into the network of a job; returns False if it has none."""
    network = blocks["model"]["network"]
    if rng.random() >= share:
        return False
    if network.startswith("llama("):
        network = _into_llama(rng, network)
        if blocks["data"]["source"].startswith("tokens("):
            network = f"{network.removesuffix(')')}, vocab = 50)"
    elif network.startswith("["):
        network = re.sub(_WIDE, lambda match: f"{match[0]}{_layer(rng)}" if rng.random() < 0.6 else match[0], network)
        network = re.sub(r"hidden = 6\b", lambda match: f"experts = {_mixture(rng)}", network)
    if "moe(" not in network:
        return False
    blocks["model"]["network"] = network
    if network.startswith("llama(") and rng.random() < 0.08:
        targets = ", ".join(f'"{name}"' for name in rng.sample(_ADAPTED, rng.randint(1, 3)))
        blocks["model"]["adapter"] = f"lora({rng.choice((1, 2))}, [{targets}])"
    if rng.random() < 0.08:
        blocks["model"]["freeze"] = f'["{rng.choice(_PATTERNS)}"]'
    if rng.random() < 0.08:
        blocks["train"]["groups"] = f'[group("{rng.choice(_PATTERNS)}", lr = 0.01)]'
    draw_expert_axis(rng, network, blocks["devices"], blocks["parallelism"])
    return True


def draw_expert_axis(rng: random.Random, network: str, devices: dict[str, str], parallelism: dict[str, str]) -> None:
    """Lets ranks of the data axis share the experts, in most plans that may have such ranks."""
    ranks = int(devices.get("cpus", "1"))
    for axis in ("pipeline", "tensor", "context"):
        ranks //= int(parallelism.get(axis, "1"))
    every = [int(experts) for experts in re.findall(r"moe\((\d+)", network)]
    counts = [str(n) for n in (2, 3, 4) if ranks % n == 0 and all(experts % n == 0 for experts in every)]
    if counts and rng.random() < _AXIS:
        parallelism["expert"] = rng.choice(counts)
    elif rng.random() < 0.02:
        parallelism["expert"] = "2"  # whether it fits or not


def _into_llama(rng: random.Random, network: str) -> str:
    layers = int(re.findall(r"layers = (\d+)", network)[0])
    if dense := rng.randint(0, layers - 1) if rng.random() < 0.3 else 0:
        return f"{network.removesuffix(')')}, experts = {_mixture(rng)}, dense_layers = {dense})"
    return f"{re.sub(r', hidden = [0-9]+', '', network).removesuffix(')')}, experts = {_mixture(rng)})"


def _layer(rng: random.Random) -> str:
    """Returns a layer of experts, alone or around its input."""
    mixture = _mixture(rng)
    return rng.choice((f", {mixture}", f", residual([rms_norm(), {mixture}])", f", repeat(2, [{mixture}])"))


def _mixture(rng: random.Random) -> str:
    experts = rng.choice((1, 2, 3, 4, 4, 4, 6, 8))
    top_k = rng.choice((1, 1, 2, 2, 2, 3, experts))
    parts = [str(experts), str(top_k if rng.random() < 0.02 else min(top_k, experts)), rng.choice(("8", "8", "16"))]
    parts += [f"shared = {rng.choice((1, 1, 2))}"] * (rng.random() < 0.3)
    parts += ["score = sigmoid"] * (rng.random() < 0.5)
    parts += ["normalize = false"] * (rng.random() < 0.3)
    parts += [f"scale = {rng.choice(('0.5', '2.5'))}"] * (rng.random() < 0.3)
    chosen = rng.random()
    if chosen < 0.45:
        parts.append(f"balance = bias{rng.choice(('()', '(0.01)', '(0.1)', '(0)'))}")
    elif chosen < 0.6:
        parts.append(f"balance = loss{rng.choice(('()', '(0.1)'))}")
    parts += [f"capacity = {rng.choice(('0.5', '1', '1.25', '2'))}"] * (rng.random() < 0.05)
    return f"moe({', '.join(parts)})"
