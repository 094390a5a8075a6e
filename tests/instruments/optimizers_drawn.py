"""Draws the optimizer of a job: torch's, those that dslc has itself, or a user's own."""

from __future__ import annotations

import random
import re

OWN = 0.08  # the share of jobs with one of a user's own
NEWER = 0.15  # the share of the rest with one of `_NEWER`
_NEWER = (
    "lion(lr = 1e-3{})",
    "lion(lr = 5e-4, betas = [0.8, 0.95]{})",
    "adafactor(lr = 0.05{})",
    "adafactor(lr = 0.02, d = 2, scale_floor = 0.01{})",
    "muon(lr = 0.02{})",
    "adamw(lr = 1e-3, state = 8bit{})",
    "muon(lr = 0.01, adjust_lr_fn = match_rms_adamw, nesterov = false, adamw_lr = 3e-3{})",
)


def draw_optimizer(rng: random.Random) -> str:
    """Returns one of torch's that ranks may divide in any way."""
    decay = ", weight_decay = 0.1" if rng.random() < 0.3 else ""
    return rng.choice(
        (f"sgd(lr = 0.05{decay})",) * 2
        + (f"sgd(lr = 0.05, momentum = 0.9, nesterov = {rng.choice(('true', 'false'))}{decay})",) * 3
        + (f"sgd(lr = 0.02, momentum = 0.5, dampening = 0.2{decay})",)
        + (f"adam(lr = 1e-3{decay})", f"adam(lr = 1e-3, amsgrad = true, betas = [0.8, 0.9]{decay})")
        + (f"adamw(lr = 1e-3{decay})",) * 2
        + (
            f"adagrad(lr = 1e-3{decay})",
            f"nadam(lr = 1e-3{decay})",
            f"rmsprop(lr = 1e-3, centered = true, momentum = 0.5{decay})",
        )
        + (("sgd(lr = 0.05, nesterov = true)", "qadam()") if rng.random() < 0.1 else ())
    )


def draw_other_optimizer(own: random.Random, newer: random.Random) -> str:
    """Returns the optimizer that takes the place of a job's now and then, a user's own or a newer one; "" if none."""
    if own.random() < OWN:
        return f'python("own_networks:{own.choice(("Heavy", "Heavy", "Normed"))}", lr = 0.02)'
    if newer.random() < NEWER:
        return newer.choice(_NEWER).format(newer.choice(("", "", ", weight_decay = 0.1")))
    return ""


FLOAT8 = 0.05  # of jobs whose dense layers multiply in 8 bits


def draw_float8(rng: random.Random, blocks: dict[str, dict[str, str]]) -> None:
    """Lets some jobs multiply in 8 bits, which takes dims that are multiples of 16."""
    if rng.random() >= FLOAT8:
        return
    gathers = ", all_gather = true" if rng.random() < 0.3 else ""
    recipe = rng.choice((f"emulate = true{gathers}", "rowwise, emulate = true"))
    blocks["train"]["precision"] = f"fp8({recipe})"
    network = re.sub(r"(?:(?<=width = )|(?<=hidden = ))\d+", "32", blocks["model"]["network"])
    network = re.sub(r"heads = \d+", "heads = 2", network)
    blocks["model"]["network"] = re.sub(r"widths = \[[^]]*\]", "widths = [32, 48]", network)
