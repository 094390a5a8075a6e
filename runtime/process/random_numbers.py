"""Where the random numbers of a rank, and of each sample of a user's data set, begin, and where they have come to.

Model: three generators are used by models and data sets: torch's (and that of the GPU), Python's and numpy's. A rank
begins all from (seed, rank, first step), so that no two ranks draw the same noise, nor a resumed training that of its
beginning. A sample begins all but the GPU's from (seed, part of the data, epoch, index), and `aside` leaves them as the
rank had them: which process makes it, and after which others, changes neither the sample nor the rank's noise.

States that are kept are tensors: Python's and numpy's (both the Mersenne Twister: 624 words of 32 bits, a position, and
half of a pair of normal numbers, where one is kept) as float64, which holds each of these exactly.

Limits: a generator that a data set keeps to itself goes on from sample to sample (W0610). Of the processor's time a
sample costs 8 us, and a batch, for the states that are kept, 150 us.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping

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


def begin_sample(seed: int, part: str, epoch: int, index: int) -> None:
    """Begins the random numbers that sample `index` of `part` (train, validation) draws in `epoch`."""
    digest = hashlib.blake2b(f"{seed}/{part}/{epoch}/{index}".encode(), digest_size=12).digest()
    # Each generator gets 32 bits of its own: two Mersenne Twisters that begin alike go on alike.
    own, numpys, torchs = (int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8))
    random.seed(own)
    np.random.seed(numpys)
    torch.default_generator.manual_seed(torchs)  # not `torch.manual_seed`, which would begin the GPU's too


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Leaves the generators of the host as they are now, whatever is drawn from them meanwhile."""
    own, numpys, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)


def state(device: torch.device) -> dict[str, Tensor]:
    """Where they have come to, by generator, on the CPU: torch's and the GPU's (uint8), Python's and numpy's
    (627, float64)."""
    found = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Goes on from what `state` gave. The GPU's stay as they are where the other training had none. Raises ValueError
    and RuntimeError for what no generator can be in."""
    torch.set_rng_state(found["torch"])
    *words, kept, gauss = found["python"].tolist()
    random.setstate((_VERSION, tuple(map(int, words)), gauss if kept else None))
    *key, position, kept, gauss = found["numpy"].tolist()
    np.random.set_state((_TWISTER, np.array(key, dtype=np.uint32), int(position), int(kept), gauss))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def _of_python() -> Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _of_numpy() -> Tensor:
    kind, key, position, kept, gauss = np.random.get_state(legacy=True)
    assert kind == _TWISTER, "numpy's own functions draw from no other"
    return torch.tensor([*map(int, key), position, kept, gauss], dtype=torch.float64)
