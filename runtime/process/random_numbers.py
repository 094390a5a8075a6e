"""Seeds the random generators of a rank and of each sample of a user's data set, and saves and restores their states.

Model: models and data sets use torch's generators (and the GPU's), Python's and numpy's. A rank seeds all of them from
(seed, rank, first step): no two ranks draw the same noise, and a resumed training does not repeat the noise of its
beginning. A sample seeds all but the GPU's from (seed, part of the data, epoch, index). Afterwards the rank seeds them
again, for each step of a training; in an evaluation `preserve_generators` restores their states. So neither the sample
nor the rank's noise depends on the process that makes the sample, or on earlier samples.

A state is saved as a tensor. Python's and numpy's generators are both the Mersenne Twister: 624 words of 32 bits, a
position, and half of a pair of normal numbers, if one is kept. float64 holds each of these exactly.

Limits: a generator that a data set keeps to itself goes on from sample to sample (W0610). Seeding takes 6 us of
processor time a sample; saving and restoring the states takes 150 us a batch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import struct
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

_VERSION = random.getstate()[0]  # version of Python's state layout
_TWISTER = "MT19937"
_THREE = struct.Struct("<III")


def begin(seed: int, rank: int, step: int = 0) -> None:
    """Seeds the generators of `rank` for a training that starts after `step` steps."""
    torch.manual_seed(begin_step(seed, rank, step))


def begin_step(seed: int, rank: int, step: int) -> int:
    """Seeds the host's generators of `rank` for the step after `step` steps, and returns the number that it takes."""
    number = (seed * 1_000_003 + step * 7_919 + rank) % 2**32
    seed_host(number)
    return number


def seed_host(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.default_generator.manual_seed(number)


def begin_sample(seed: int, part: str, epoch: int, index: int) -> None:
    """Seeds the generators for sample `index` of `part` (train, validation) in `epoch`."""
    digest = _of_epoch(seed, part, epoch).copy()
    digest.update(b"%d" % index)
    # Each generator gets 32 bits of its own: two Mersenne Twisters with one seed draw the same numbers.
    own, numpys, torchs = _THREE.unpack(digest.digest())
    random.seed(own)
    np.random.seed(numpys)
    torch.default_generator.manual_seed(torchs)  # not `torch.manual_seed`, which would seed the GPU's too


@functools.lru_cache(maxsize=8)
def _of_epoch(seed: int, part: str, epoch: int) -> hashlib.blake2b:
    return hashlib.blake2b(f"{seed}/{part}/{epoch}/".encode(), digest_size=_THREE.size)


@contextlib.contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the states of the host's generators on leaving, whatever has been drawn in between."""
    own, numpys, torchs = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torchs)


def state(device: torch.device) -> dict[str, Tensor]:
    """Returns the states, on the CPU: torch's and the GPU's (uint8), Python's and numpy's (627, float64)."""
    found = {"torch": torch.get_rng_state(), "python": _of_python(), "numpy": _of_numpy()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Restores states that `state` returned; the GPU's stays if the other training had none. Raises ValueError and
    RuntimeError for an impossible state.
    """
    torch.set_rng_state(found["torch"])
    *words, kept, gauss = found["python"].tolist()
    random.setstate((_VERSION, tuple(map(int, words)), gauss if kept else None))
    *key, position, kept, gauss = found["numpy"].tolist()
    np.random.set_state((_TWISTER, np.array(key, dtype=np.uint32), int(position), int(kept), gauss))
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def generator(seed: int, stream: str) -> torch.Generator:
    """Returns a generator on the CPU for one named stream of random numbers; streams of one seed are independent."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=4).digest()
    # The generator, a Mersenne Twister, takes 32 bits of its seed and drops the rest.
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


def _of_python() -> Tensor:
    _, words, gauss = random.getstate()
    return torch.tensor([*words, gauss is not None, gauss or 0.0], dtype=torch.float64)


def _of_numpy() -> Tensor:
    kind, key, position, kept, gauss = np.random.get_state(legacy=True)
    assert kind == _TWISTER, "numpy's own functions draw from no other"
    return torch.tensor([*map(int, key), position, kept, gauss], dtype=torch.float64)
