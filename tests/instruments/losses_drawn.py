"""Gives jobs drawn at random a loss of a user's own that draws (helpers/own_loss_draws.py): noise, dropout of scores, a
mask of samples or positions.
"""

from __future__ import annotations

import random
import re

LOSS_DRAWS = 0.05  # the share of jobs with such a loss
_TOKENS = re.compile(r"stdlib\(|text\(|tokens\(|.*vocab = ")
_CLASSES = re.compile(r'cross_entropy\(|python\("own_networks:classified"')
_NUMBERS = re.compile(r'(mse|l1|bce)\(|python\("own_networks:measured"')

Blocks = dict[str, dict[str, str]]


def draw_drawing_loss(rng: random.Random, blocks: Blocks, share: float = LOSS_DRAWS) -> None:
    """Replaces the loss of a job by one that draws and takes the same scores and targets."""
    if rng.random() >= share:
        return
    loss = blocks["model"]["loss"]
    names: tuple[str, ...] = ()
    if _CLASSES.match(loss):
        tokens = _TOKENS.match(blocks["data"]["source"].removeprefix("mixture(["))
        names = (
            ("noisy_tokens", "masked_tokens")
            if tokens
            else ("noisy", "noisy", "noisy_mean", "noisy_mean", "against_others")
        )
    elif _NUMBERS.match(loss):
        names = ("noisy_numbers",)
    if names:
        name = rng.choice(names)
        more = ", over = all" if name == "against_others" else ""
        blocks["model"]["loss"] = f'python("own_loss_draws:{name}"{more})'
