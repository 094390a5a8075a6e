"""The GPUs of this machine: their memory, and for `gpus = free(n)` the GPUs that nobody uses.

Model: a process that uses a GPU takes some hundreds of MiB of it for its context before the first tensor. So a GPU with
less than `IN_USE` taken is free. `nvidia-smi`, which comes with the driver, says how much is taken. The processes that
this one starts then see the free ones alone (CUDA_VISIBLE_DEVICES), numbered from 0: the plan has their count.

Limits: of NVIDIA's GPUs only. Two programs that ask at the same moment may choose the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dslc.probe.child import in_child

VISIBLE = "CUDA_VISIBLE_DEVICES"
IN_USE = 100  # MiB; a context takes more, what the driver keeps for itself less
_ASK = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
_BEFORE: list[str | None] = []  # what was visible before any were chosen


class GPU(NamedTuple):
    """A GPU as torch sees it: its bytes of memory, and the name that the driver has for it."""

    memory: int
    uuid: str


def gpus_here() -> tuple[int, ...]:
    """Returns the memory of each GPU of this machine, in bytes. Raises RuntimeError."""
    return tuple(gpu.memory for gpu in _visible_gpus())


def choose_free(count: int) -> tuple[tuple[int, ...], int]:
    """Leaves `count` of the GPUs that nobody uses visible to the processes that are started from here, or all of them
    if there are fewer. Returns the memory of each, in bytes, and the count of all other GPUs. Raises RuntimeError.
    """
    if not _BEFORE:
        _BEFORE.append(os.environ.get(VISIBLE))
    restore_visible()
    used_memory = _used_memory()  # first: `_visible_gpus` uses a GPU for a moment
    visible = _visible_gpus()
    if used_memory is None and visible:
        raise RuntimeError("there is no `nvidia-smi` to tell which GPUs are free; `devices.gpus` can name them")
    free_gpus = free_of(visible, used_memory or {})
    chosen_gpus = free_gpus[:count]
    if visible:
        os.environ[VISIBLE] = ",".join(gpu.uuid for gpu in chosen_gpus) or "-1"
    return tuple(gpu.memory for gpu in chosen_gpus), len(visible) - len(free_gpus)


def restore_visible() -> None:
    """Makes the GPUs visible again that were visible before the choice."""
    if _BEFORE and _BEFORE[0] is not None:
        os.environ[VISIBLE] = _BEFORE[0]
    elif _BEFORE:
        os.environ.pop(VISIBLE, None)


def free_of(visible: Sequence[GPU], used_memory: Mapping[str, int]) -> list[GPU]:
    """Returns the GPUs that nobody uses, in order; `used_memory` has the MiB that are in use, by name."""
    return [gpu for gpu in visible if used_memory.get(gpu.uuid, 0) < IN_USE]


def parse_used_memory(output: str) -> dict[str, int]:
    """Returns the MiB in use of each GPU, by its name, from what `nvidia-smi` prints. One whose memory is not told, as
    with MIG, counts as in use. Raises ValueError for anything else.
    """
    memory = {}
    for line in output.splitlines():
        uuid, comma, used_text = (part.strip() for part in line.partition(","))
        if not comma or not uuid.startswith("GPU-"):
            raise ValueError(line)
        memory[uuid] = int(used_text) if used_text.isdecimal() else IN_USE
    return memory


def _used_memory() -> dict[str, int] | None:
    """Asks the driver; returns None where there is none."""
    import subprocess  # here: most commands ask nobody

    try:
        process = subprocess.run(_ASK, capture_output=True, text=True, timeout=60)
        if process.returncode:
            raise RuntimeError(f"`nvidia-smi` fails: {(process.stderr or process.stdout).strip()}")
        return parse_used_memory(process.stdout)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise RuntimeError("`nvidia-smi`, which tells which GPUs are free, does not answer") from None
    except ValueError as error:
        raise RuntimeError(f"`nvidia-smi` says something else than which GPUs are free: {error}") from None


def _visible_gpus() -> list[GPU]:
    """Asks torch in a child: no process can use a GPU if it is forked from a process that has initialized CUDA."""

    def look() -> list[tuple[int, str]]:
        import torch

        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [(gpu.total_memory, f"GPU-{gpu.uuid}") for gpu in properties]

    answer = in_child(look)
    if "made" not in answer:
        raise RuntimeError(f"the GPUs of this machine cannot be queried: {answer['error']}")
    return [GPU(memory, uuid) for memory, uuid in answer["made"]]
