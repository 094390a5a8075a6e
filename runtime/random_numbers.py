"""Where the random numbers of a rank begin, and where they have come to.

Model: three generators are used by models and data sets: torch's (and that of the GPU), Python's and numpy's. All are
begun from (seed, rank, first step), so that no two ranks draw the same noise, nor a resumed training that of its
beginning.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def begin(seed: int, rank: int, step: int = 0) -> None:
    """Begins the random numbers of `rank` for a training that starts after `step` steps."""
    number = (seed * 1_000_003 + step * 7_919 + rank) % 2**32
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def state(device: torch.device) -> dict[str, Tensor]:
    """Where they have come to, by generator: bytes, on the CPU."""
    others = pickle.dumps((random.getstate(), np.random.get_state()))
    found = {"torch": torch.get_rng_state(), "python": torch.frombuffer(bytearray(others), dtype=torch.uint8)}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Goes on from what `state` gave. The GPU's stay as they are where the other training had none."""
    torch.set_rng_state(found["torch"])
    own, numpys = pickle.loads(found["python"].numpy().tobytes())
    random.setstate(own)
    np.random.set_state(numpys)
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
