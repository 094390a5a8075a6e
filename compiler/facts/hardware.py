"""The hardware catalogue: memory and speed of one device of each kind, and the speed of its links.

Figures are the makers' for dense arithmetic (no structured sparsity), with float32 accumulation; links in bytes per
second and direction. They are peaks: a prediction made with them is a bound, not a promise. `network` is the usual
figure between nodes with such devices (a 100, 200 or 400 Gbit/s port for each), and the first one to replace.

Sources: NVIDIA data sheets "V100" (2020), "A10" (2021), "A100 80GB" (2021), "L4" and "L40S" (2023), "H100" (2023),
"H200" (2024), "HGX B200" (2024); NVIDIA "Ampere GA102" (2021) and "Ada" (2022) white papers for the RTX cards; AMD
"Instinct MI300X" data sheet (2023). Fp32 is outside of tensor cores, as torch computes it by default.

Fits of the model of time to published runs are the files of the folder `catalogues`, one for each kind, with their
sources. `python -m benchmarks.predictions` writes them. A kind without a file takes the fit of the most similar kind.

A user's own file (`devices.catalogue`, see catalogue.py) adds kinds, or replaces figures of these. CPUs have no figures
without it: the speed of one process depends on its share of the cores and on the memory's bandwidth.
"""

from __future__ import annotations

import os
from functools import cache
from math import log

from dslc.compiler.facts.calibration import Calibration, RunFit
from dslc.dsl.record import Record, record

GiB, MiB, GB = 1024**3, 1024**2, 10**9

# Memory that CUDA takes on each device before the first tensor: its context and the kernels that it loads. 1343 MB is
# Hugging Face's measurement ("Model training anatomy"), with kernels loaded eagerly: since CUDA 11.7, an upper bound.
CUDA_CONTEXT = 1343 * 10**6
# NCCL's buffers of one communicator: at most 32 channels, each with 4 MiB (NCCL_BUFFSIZE) to send and to receive.
NCCL_BUFFERS = 2 * 32 * 4 * MiB
# Memory that torch (2.13) allocates for cuBLAS's workspaces, once for the thread of the forward pass and once for that
# of the backward pass, by the default of CUBLAS_WORKSPACE_CONFIG: `:4096:2:16:8` (KiB), since Hopper `:4096:8`.
WORKSPACE, WORKSPACE_BEFORE_HOPPER = 2 * 32 * MiB, 2 * (2 * 4096 + 8 * 16) * 1024
# The parts of a segment of `devices.backend = shared_memory` (runtime/transport/shared_segment.py), but for messages.
PAGE = 4096  # bytes
WORD = 64  # bytes: a cache line, with one number in it
WORDS_OF_RANK = 2  # and one for each rank that it sends messages to
DESCRIPTOR = 2 * WORD  # bytes of the description of a message
DESCRIPTORS = 256  # messages from one rank to another that may wait to be received
SLOTS = 2  # a rank fills one while its peers read the other
SLOT_BYTES = MiB  # two ranks' pieces stay in a core's cache
_BEFORE_HOPPER = ("v100", "a10", "a100_40g", "a100_80g", "l4", "l40s", "rtx3090", "rtx4090")


@record
class Hardware(Record):
    """One kind of device. None: unknown, or not available."""

    kind: str
    cpu: bool = False  # true: the device is a process on the CPU, with its share of the cores; else a GPU
    memory: int | None = None  # bytes
    flops_fp32: float | None = None  # FLOP/s
    flops_tf32: float | None = None  # for matrix products in float32 with rounded factors
    flops_bf16: float | None = None
    flops_fp16: float | None = None
    flops_fp8: float | None = None  # None: it has no products in 8 bits
    link: float | None = None  # bytes/s to a device of the same node
    network: float | None = None  # bytes/s from a node to another, for each device
    bandwidth: float | None = None  # bytes/s of its memory
    efficiency: float = 1.0  # fraction of its FLOP/s that products reach, for estimates; 1: they are bounds
    calibration: Calibration | None = None  # times that were measured on a machine of this kind
    fit: RunFit | None = None  # constants that were fitted to steps on a machine of this kind

    def flops(self, precision: str) -> float | None:
        """Returns the FLOP/s of products in a precision: fp32, bf16, fp16 or fp8. What a device lacks runs as fp32."""
        found: float | None = getattr(self, f"flops_{precision}")
        return self.flops_fp32 if found is None else found


def framework_bytes(device: str, world_size: int) -> int:
    """Returns the memory that the framework takes on a device outside of torch's allocator: 0 on a CPU, where it is
    unknown.
    """
    if device == "cpu":
        return 0
    return CUDA_CONTEXT + (NCCL_BUFFERS if world_size > 1 else 0)


def segment_front_bytes(ranks: int) -> int:
    """Returns the bytes before the slots of a segment of a group of `ranks`: words and descriptors, in whole pages."""
    return -(-((WORDS_OF_RANK + ranks) * WORD + ranks * DESCRIPTORS * DESCRIPTOR) // PAGE) * PAGE


def segment_bytes(ranks: int) -> int:
    """Returns the bytes of the segment that a rank shares with its peers in a group of `ranks`; 0 for a rank alone."""
    return segment_front_bytes(ranks) + SLOTS * SLOT_BYTES if ranks > 1 else 0


def workspace_bytes(device: str, hardware: Hardware) -> int:
    """Returns the bytes of libraries' workspaces in torch's own allocator."""
    if device == "cpu":
        return 0
    return WORKSPACE_BEFORE_HOPPER if hardware.kind in _BEFORE_HOPPER else WORKSPACE


def _gpu(
    kind: str,
    memory: int,
    fp32: float,
    tf32: float | None,
    bf16: float | None,
    fp16: float,
    fp8: float | None,
    link: float,
    network: float,
    bandwidth: float,
) -> Hardware:
    """Makes a GPU's entry from speeds in TFLOP/s, and links and its memory in GB/s."""
    return Hardware(
        kind=kind,
        memory=memory,
        flops_fp32=fp32 * 1e12,
        flops_tf32=None if tf32 is None else tf32 * 1e12,
        flops_bf16=None if bf16 is None else bf16 * 1e12,
        flops_fp16=fp16 * 1e12,
        flops_fp8=None if fp8 is None else fp8 * 1e12,
        link=link * 1e9,
        network=network * 1e9,
        bandwidth=bandwidth * 1e9,
    )


CATALOGUE: dict[str, Hardware] = {
    h.kind: h
    for h in (
        Hardware(kind="cpu", cpu=True),
        Hardware(kind="gpu"),
        #    kind        memory    fp32   tf32   bf16   fp16     fp8  link  network  bandwidth
        _gpu("v100", 32 * GiB, 15.7, None, None, 125, None, 150, 12.5, 900),
        _gpu("a10", 24 * GiB, 31.2, 62.5, 125, 125, None, 32, 12.5, 600),
        _gpu("a100_40g", 40 * GiB, 19.5, 156, 312, 312, None, 300, 25, 1555),
        _gpu("a100_80g", 80 * GiB, 19.5, 156, 312, 312, None, 300, 25, 2039),
        _gpu("l4", 24 * GiB, 30.3, 60, 121, 121, 242, 32, 12.5, 300),
        _gpu("l40s", 48 * GiB, 91.6, 183, 362, 362, 733, 32, 25, 864),
        _gpu("h100", 80 * GiB, 67, 494, 989, 989, 1979, 450, 50, 3350),
        _gpu("h200", 141 * GB, 67, 494, 989, 989, 1979, 450, 50, 4800),
        _gpu("b200", 180 * GB, 75, 1100, 2250, 2250, 4500, 900, 50, 8000),
        _gpu("rtx3090", 24 * GiB, 35.6, 35.6, 71, 71, None, 32, 1.25, 936),
        _gpu("rtx4090", 24 * GiB, 82.6, 82.6, 165.2, 165.2, 330.3, 32, 1.25, 1008),
        _gpu("mi300x", 192 * GB, 163.4, 653.7, 1307.4, 1307.4, 2614.9, 448, 50, 5300),
    )
}


FITS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "catalogues")


@record
class PublishedFit(Record):
    """The constants of the model of time for one kind of GPU, most of them shares of the data sheet's figures.

    `width` and `length` are the least and the greatest width of blocks and length of sequences among the runs.
    """

    kind: str
    products: float  # of the peak: matrix products without end
    memory: float  # of the memory's bandwidth: what products read and write, with the operations between them
    attention: float  # of the peak: fused attention
    scores: float  # of the memory's bandwidth: attention that stores its scores; 0: it is fused
    loss: float  # of the memory's bandwidth: logits in float32, once forward and twice backward
    update: float  # of the memory's bandwidth: parameters, gradients and the optimizer's state
    links: float  # of the links within a node and between nodes
    overlap: float  # of the collectives beside arithmetic: what it hides
    latency: float  # seconds of a collective of 2 ranks; of n ranks log2(n) times as much
    launch: float  # seconds in which the host starts a product and the operations after it, forward
    rest: float  # seconds of a step that none of its parts accounts for
    width: tuple[int, int]
    length: tuple[int, int]


def nearest_fit(hardware: Hardware) -> PublishedFit | None:
    """Returns the fit of this kind of GPU, or of the kind whose peak and bandwidth are most similar; None if either
    figure is unknown.
    """
    if hardware.cpu or hardware.bandwidth is None:
        return None
    if hardware.kind in fitted_kinds():
        return read_fit(hardware.kind)
    return read_fit(min(fitted_kinds(), key=lambda kind: _distance(CATALOGUE[kind], hardware)))


@cache
def fitted_kinds() -> tuple[str, ...]:
    return tuple(sorted(name.removesuffix(".toml") for name in os.listdir(FITS) if name.endswith(".toml")))


@cache
def read_fit(kind: str) -> PublishedFit:
    import tomllib  # here: jobs on CPUs need no fit

    with open(os.path.join(FITS, f"{kind}.toml"), "rb") as file:
        table = tomllib.load(file)
    return PublishedFit(**table | {"kind": kind, "width": tuple(table["width"]), "length": tuple(table["length"])})


def _distance(one: Hardware, other: Hardware) -> float:
    """Returns how far apart two kinds are in their peak for 16 bits and in their memory's bandwidth."""
    assert one.bandwidth is not None and other.bandwidth is not None
    peaks = [each.flops("fp16") or 1.0 for each in (one, other)]
    return abs(log(peaks[0] / peaks[1])) + abs(log(one.bandwidth / other.bandwidth))
