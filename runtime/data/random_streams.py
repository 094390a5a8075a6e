"""Named streams of random numbers that follow from a seed, for all that decides the order of samples."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, stream: str) -> torch.Generator:
    """Returns a generator on the CPU for one named stream of random numbers; streams of one seed are independent."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=4).digest()
    # The generator, a Mersenne Twister, takes 32 bits of its seed and drops the rest.
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
