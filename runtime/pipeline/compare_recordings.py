"""Compares the forward passes that the ranks of a pipeline have recorded.

Model: each rank records the whole network by itself, and runs the stages that it cuts out of its own recording. So a
path that follows from the rank gives stages that do not belong together. The ranks compare the calls of the recordings:
what is called, with which tensors by number or name, and with which plain arguments.

Limits: the numbers of constant tensors are not compared.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.pipeline.recording import Call, Constant, Recording
from dslc.runtime.process.job_line import mark_errors

RankCalls = tuple[int, Sequence[tuple[str, str]]]  # a rank, and its calls with the lines of the user's code


class RecordingsDifferError(RuntimeError):
    """Ranks have recorded different forward passes. The text is for the user; `told` on the rank that reports it."""

    def __init__(self, message: str, *, told: bool) -> None:
        super().__init__(message)
        self.told = told
        self.add_note(
            "the forward pass depends on something that differs between ranks: their number, the name of a host, an "
            "environment variable, a random number"
        )
        self.add_note("let all ranks take the same path; a pipeline records it once")


def compare_recordings(job: JobProgram, recording: Recording) -> None:
    """Raises RecordingsDifferError if the ranks along the pipeline and data axes have recorded different passes."""
    group = mesh_of(job).group("pipeline", "data")
    if group is None:
        return
    calls = [(_text(call), call.where) for call in recording.calls]
    digest = hashlib.blake2b("\n".join(text for text, _ in calls).encode()).hexdigest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    of_all: list[Any] = [None] * len(digests)
    dist.all_gather_object(of_all, (dist.get_rank(), calls), group=group)
    other = next(each for each, its in zip(of_all, digests, strict=True) if its != digests[0])
    raise_difference(job, of_all[0], other)


def raise_difference(
    job: JobProgram, one: tuple[int, Sequence[tuple[str, str]]], other: tuple[int, Sequence[tuple[str, str]]]
) -> None:
    pairs = enumerate(itertools.zip_longest(one[1], other[1]), 1)
    number, pair = next((n, pair) for n, pair in pairs if None in pair or pair[0][0] != pair[1][0])
    texts = [
        f"{call[0] if call is not None else 'none'} on rank {rank}" + (f" ({call[1]})" if call and call[1] else "")
        for (rank, _), call in zip((one, other), pair, strict=True)
    ]
    python = job.model.python
    with mark_errors(python.line if python is not None else ""):
        raise RecordingsDifferError(
            f"the ranks record different forward passes: call {number} is {texts[0]}, and {texts[1]}",
            told=dist.get_rank() == one[0],
        )


def _text(call: Call) -> str:
    what = f"`{call.what}`" if call.layer else f"`{getattr(call.what, '__name__', call.what)}`"
    arguments = [_argument(each) for each in call.args] + [
        f"{name}={_argument(call.kwargs[name])}" for name in call.kwargs
    ]
    return f"{what}({', '.join(arguments)})"


def _argument(value: object) -> str:
    """Returns an argument in words that are the same in each process."""
    match value:
        case Constant(tensor):
            return f"tensor{tuple(tensor.shape)}"
        case None | bool() | int() | float() | complex() | str() | torch.dtype() | torch.device():
            return str(value)
        case tuple() if hasattr(value, "_fields"):
            return f"{type(value).__name__.lower()}({', '.join(map(_argument, value))})"
        case tuple() | list():
            return f"[{', '.join(map(_argument, value))}]"
        case dict():
            return f"[{', '.join(f'{key}={_argument(each)}' for key, each in value.items())}]"
        case slice():
            return f"slice[{', '.join(map(_argument, (value.start, value.stop, value.step)))}]"
    return type(value).__name__
