"""The hardware catalogue: what one device of a kind holds and does, and how fast its links are.

Figures are the vendors' for dense arithmetic (no structured sparsity), links in bytes per second and direction. They
are peaks: a prediction made with them is a bound, not a promise.

Sources: NVIDIA data sheets "A100 80GB" (2021), "H100" (2023), "H200" (2024), "V100" (2020), "L40S" (2023),
"B200" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

GiB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device. None: not known beforehand."""

    kind: str
    memory: int | None  # bytes
    flops_fp32: float | None  # FLOP/s
    flops_low: float | None  # FLOP/s of bf16 and fp16 matrix products
    link: float | None  # bytes/s to a device of the same node
    network: float | None  # bytes/s from a node to another, for each device


CATALOGUE: dict[str, Hardware] = {
    h.kind: h
    for h in (
        Hardware(kind="cpu", memory=None, flops_fp32=None, flops_low=None, link=None, network=None),
        Hardware(kind="gpu", memory=None, flops_fp32=None, flops_low=None, link=None, network=None),
        Hardware(kind="v100", memory=32 * GiB, flops_fp32=15.7e12, flops_low=125e12, link=150e9, network=12.5e9),
        Hardware(kind="a100_40g", memory=40 * GiB, flops_fp32=19.5e12, flops_low=312e12, link=300e9, network=25e9),
        Hardware(kind="a100_80g", memory=80 * GiB, flops_fp32=19.5e12, flops_low=312e12, link=300e9, network=25e9),
        Hardware(kind="l40s", memory=48 * GiB, flops_fp32=91.6e12, flops_low=362e12, link=32e9, network=25e9),
        Hardware(kind="h100", memory=80 * GiB, flops_fp32=67e12, flops_low=989e12, link=450e9, network=50e9),
        Hardware(kind="h200", memory=141 * 10**9, flops_fp32=67e12, flops_low=989e12, link=450e9, network=50e9),
        Hardware(kind="b200", memory=180 * 10**9, flops_fp32=75e12, flops_low=2250e12, link=900e9, network=50e9),
    )
}
