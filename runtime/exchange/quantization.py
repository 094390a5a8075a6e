"""MinMaxUInt8: numbers in 8 bits between the minimum and the maximum of their row.

Rule: a row t has lo, hi = min, max. Let s = 255 / (hi - lo + 1e-7) and b = round(hi s) - 255. The code of a number is
round(t s) - b, and a code stands for (code + b) / s. The steps are 1/s apart and lie on its multiples, so that 0 stays
0; a number moves by half a step at most, and the order of numbers is kept.

Source: Bagua (Gan et al. 2021, arXiv:2107.01499), `MinMaxUInt8`. Differences: codes are limited to 0 … 255 and s to
what does not overflow. The reason is a row whose numbers are nearly the same: float32 cannot tell neighbouring steps
apart there, and Bagua's codes wrap around.

Model: `compress` packs lo and hi as 8 bytes in front of the codes of a row, so that one collective carries both.

Contract: a row with nan or infinity is restored as nan throughout, never as a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEADER = 8  # bytes: the minimum and the maximum, in float32
_LARGEST = 2.0**120  # of t s


def compress(rows: Tensor) -> Tensor:
    """Returns float32 rows as uint8 rows that are `HEADER` longer."""
    ends = torch.stack((rows.amin(dim=1), rows.amax(dim=1)), dim=1)  # `aminmax` of rows takes 25 times as long
    packed = rows.new_empty((rows.shape[0], HEADER + rows.shape[1]), dtype=torch.uint8)
    packed[:, :HEADER] = ends.view(torch.uint8)
    scale, base = _grid(ends)
    packed[:, HEADER:] = torch.mul(rows, scale).round_().sub_(base).clamp_(0, 255)
    return packed


def restore(packed: Tensor) -> Tensor:
    scale, base = _grid(packed[:, :HEADER].clone(memory_format=torch.contiguous_format).view(torch.float32))
    return packed[:, HEADER:].to(torch.float32).add_(base).div_(scale)


def _grid(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns s and b of each row, as columns; nan unless both its ends are finite."""
    low, high = ends[:, :1], ends[:, 1:]
    scale = 127.5 / (high / 2 - low / 2 + 0.5e-7)  # by halves, as hi - lo may overflow
    scale = torch.minimum(scale, _LARGEST / ends.abs().amax(dim=1, keepdim=True))
    scale = torch.where(ends.isfinite().all(dim=1, keepdim=True), scale, torch.full_like(scale, torch.nan))
    return scale, (high * scale).round() - 255
