"""Seeds the random generators of a rank and of each sample of a user's data set, and saves and restores their states.

Model: models and data sets use torch's generators (and the GPU's), Python's and numpy's. A rank seeds all of them from
(seed, rank, first step): no two ranks draw the same noise, and a resumed training does not repeat the noise of its
beginning. A sample seeds all but the GPU's from (seed, part of the data, epoch, index). Afterwards the rank seeds them
again, for each step of a training; in an evaluation `preserve_generators` restores their states. So neither the sample
nor the rank's noise depends on the process that makes the sample, or on earlier samples.

A state is saved as a tensor. Python's and numpy's generators are both the Mersenne Twister: 624 words of 32 bits, a
position, and half of a pair of normal numbers, if one is kept. float64 holds each of these exactly.

Most data sets draw nothing, and Python's and numpy's generators take three quarters of the time of seeding. While no
sample of a data set has drawn from these two, they are seeded once a batch (`SampleSeeds`). After each sample the next
number of either tells whether the sample drew. If it did, it is made again with its own numbers, and from then on all
generators are seeded for each sample.

Limits: a generator that a data set keeps to itself goes on from sample to sample (W0610). A sample that saves the state
of Python's or numpy's generator, draws without seeding it, and restores the state, is not seen to draw. Seeding takes 6
us of processor time a sample, and 2 us if these two are not drawn from; saving and restoring states 150 us a batch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

_VERSION = random.getstate()[0]  # version of Python's state layout
_TWISTER = "MT19937"
_THREE = struct.Struct("<III")
_WATCHED = 1024  # samples, after which a batch seeds Python's and numpy's generators again

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


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
    own, numpys, torchs = _numbers_of(seed, part, epoch, index)
    random.seed(own)
    np.random.seed(numpys)
    torch.default_generator.manual_seed(torchs)  # not `torch.manual_seed`, which would seed the GPU's too


def _numbers_of(seed: int, part: str, epoch: int, index: int) -> tuple[int, int, int]:
    digest = _of_epoch(seed, part, epoch).copy()
    digest.update(b"%d" % index)
    # Each generator gets 32 bits of its own: two Mersenne Twisters with one seed draw the same numbers.
    return _THREE.unpack(digest.digest())


class Indexed(Protocol[T_co]):
    def __getitem__(self, index: int, /) -> T_co: ...


class SampleSeeds:
    """Seeds the generators for the samples of one data set; Python's and numpy's if any sample has drawn from them."""

    def __init__(self) -> None:
        self._draws: bool | None = None  # None: no sample has been made
        self._place = _WATCHED  # in the numbers that follow if nobody draws

    def begin_batch(self) -> None:
        """Begins a batch: from here on nobody else draws until its last sample is made."""
        self._place = _WATCHED

    def end_batch(self, seed: int, part: str, epoch: int, index: int) -> None:
        """Leaves Python's and numpy's generators as sample `index`, the last one, left them."""
        if not self._draws:
            own, numpys, _ = _numbers_of(seed, part, epoch, index)
            random.seed(own)
            np.random.seed(numpys)

    def make(self, samples: Indexed[T], seed: int, part: str, epoch: int, index: int) -> T:
        """Returns the next sample of a batch, drawn with its own random numbers."""
        if self._draws is False:
            if self._place == _WATCHED:
                random.seed(0)
                np.random.seed(0)
                self._place = 0
            torch.default_generator.manual_seed(_numbers_of(seed, part, epoch, index)[2])
            try:
                sample = samples[index]
            except BaseException:  # any kind: the user's code runs
                self._draws = self._has_drawn()
                if not self._draws:
                    raise
            else:
                self._draws = self._has_drawn()
                if not self._draws:
                    return sample
        begin_sample(seed, part, epoch, index)
        if self._draws:
            return samples[index]
        before = _host_states()
        try:
            return samples[index]
        finally:
            self._draws = before != _host_states()

    def _has_drawn(self) -> bool:
        """True if the last sample drew: the next number of a generator is not the next of its known sequence."""
        own, numpys = _numbers_that_follow()
        place, self._place = self._place, self._place + 1
        return random.getrandbits(32) != own[place] or np.random.random_sample() != numpys[place]


@functools.cache
def _numbers_that_follow() -> tuple[list[int], list[float]]:
    own, numpys = random.Random(0), np.random.RandomState(0)
    return [own.getrandbits(32) for _ in range(_WATCHED)], numpys.random_sample(_WATCHED).tolist()


def _host_states() -> tuple[object, object]:
    return random.getstate(), _of_numpy().tolist()


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
