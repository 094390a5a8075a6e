"""Adafactor with torch's update (Shazeer and Stern 2018, arXiv:1804.04235): row and column factors for a second moment.

Model: torch's for-loop. Its `foreach` form needs as much memory again as all parameters, and the rank of the factors
is why it is chosen.
"""

from __future__ import annotations

import torch

from dslc.runtime.optimizer.local_parts import LocalParts, Options


class Adafactor(LocalParts):
    """torch's Adafactor over this rank's parameters."""

    def __init__(self, groups: list[Options], **options: object) -> None:
        def inner(group: Options) -> torch.optim.Optimizer:
            arguments = {name: group[name] for name in ("params", *options)}
            return torch.optim.Adafactor([arguments], foreach=False)

        super().__init__(groups, options, inner)
