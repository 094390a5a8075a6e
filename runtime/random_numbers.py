"""Where the random numbers of a rank begin, and where they have come to.

Model: three generators are used by models and data sets: torch's (and that of the GPU), Python's and numpy's. All are
begun from (seed, rank, first step), so that no two ranks draw the same noise, nor a resumed training that of its
beginning. Their states are tensors: Python's and numpy's (both the Mersenne Twister: 624 words of 32 bits, a position,
and half of a pair of normal numbers, where one is kept) as float64, which holds each of these exactly.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_VERSION = random.getstate()[0]  # of the layout of Python's state
_TWISTER = "MT19937"


def begin(seed: int, rank: int, step: int = 0) -> None:
    """Begins the random numbers of `rank` for a training that starts after `step` steps."""
    number = (seed * 1_000_003 + step * 7_919 + rank) % 2**32
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def state(device: torch.device) -> dict[str, Tensor]:
    """Where they have come to, by generator, on the CPU: torch's and the GPU's (uint8), Python's (626) and numpy's
    (627, float64)."""
    found = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Goes on from what `state` gave. The GPU's stay as they are where the other training had none. Raises ValueError
    and RuntimeError for what no generator can be in."""
    torch.set_rng_state(found["torch"])
    *words, half = found["python"].tolist()
    random.setstate((_VERSION, tuple(map(int, words)), None if math.isnan(half) else half))
    *key, position, kept, gauss = found["numpy"].tolist()
    np.random.set_state((_TWISTER, np.array(key, dtype=np.uint32), int(position), int(kept), gauss))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def _of_python() -> Tensor:
    _, words, half = random.getstate()
    return torch.tensor([*words, math.nan if half is None else half], dtype=torch.float64)


def _of_numpy() -> Tensor:
    kind, key, position, kept, gauss = np.random.get_state(legacy=True)
    assert kind == _TWISTER, "numpy's own functions draw from no other"
    return torch.tensor([*map(int, key), position, kept, gauss], dtype=torch.float64)
