"""Records the forward pass of a network that a function makes, and cuts it into the parts that stages run.

While calls are recorded, functions of one rank alone stand for attention that spans a context axis or stays within
documents; the parts call the real ones.

Each rank records the whole network by itself, and runs the stages that it cuts out of its own recording. So a
path that follows from the rank gives stages that do not belong together. The ranks compare the calls of the recordings:
what is called, with which tensors by number or name, and with which plain arguments.

Limits: the numbers of constant tensors are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.model import documents
from dslc.runtime.parallel import context_parallel
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import Call, Constant, Recording
from dslc.runtime.pipeline.stage import CapturedPart
from dslc.runtime.process.job_line import mark_errors

RankCalls = tuple[int, Sequence[tuple[str, str]]]  # a rank, and its calls with the lines of the user's code


class RecordingsDifferError(RuntimeError):
    """Ranks have recorded different forward passes. The text is for the user; `told` on the rank that reports it."""

    def __init__(self, message: str, *, is_reported: bool) -> None:
        super().__init__(message)
        self.told = is_reported
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
    digests = [digest] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    rank_calls = [(dist.get_rank(), calls)] * len(digests)
    dist.all_gather_object(rank_calls, rank_calls[0], group=group)
    different = next(
        calls_of_rank
        for calls_of_rank, rank_digest in zip(rank_calls, digests, strict=True)
        if rank_digest != digests[0]
    )
    raise_difference(job, rank_calls[0], different)


def raise_difference(job: JobProgram, expected: RankCalls, different: RankCalls) -> None:
    pairs = enumerate(itertools.zip_longest(expected[1], different[1]), 1)
    number, pair = next((n, pair) for n, pair in pairs if None in pair or pair[0][0] != pair[1][0])
    texts = [
        f"{call[0] if call is not None else 'none'} on rank {rank}" + (f" ({call[1]})" if call and call[1] else "")
        for (rank, _), call in zip((expected, different), pair, strict=True)
    ]
    python = job.model.python
    with mark_errors(python.line if python is not None else ""):
        raise RecordingsDifferError(
            f"the ranks record different forward passes: call {number} is {texts[0]}, and {texts[1]}",
            is_reported=dist.get_rank() == expected[0],
        )


def _text(call: Call) -> str:
    target = f"`{call.what}`" if call.layer else f"`{getattr(call.what, '__name__', call.what)}`"
    arguments = [_argument(value) for value in call.args] + [
        f"{name}={_argument(call.kwargs[name])}" for name in call.kwargs
    ]
    return f"{target}({', '.join(arguments)})"


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
            return f"[{', '.join(f'{key}={_argument(entry)}' for key, entry in value.items())}]"
        case slice():
            return f"slice[{', '.join(map(_argument, (value.start, value.stop, value.step)))}]"
    return type(value).__name__


def captured_parts(
    job: JobProgram, model: nn.Module, input_form: InputForm, indices: Sequence[int]
) -> dict[int, CapturedPart]:
    """Returns the parts of a user's own module that the stages `indices` run."""
    from dslc.runtime.pipeline.capture import capture
    from dslc.runtime.pipeline.captured import codes

    assert job.pipeline is not None
    stages = job.pipeline.stages
    layers = [name for stage in stages for name in stage.modules]
    mesh, model_step = mesh_of(job), job.model
    piece = mesh.coordinates["context"]
    kept_apart = documents.apply(
        model_step.documents,
        model,
        masks=model_step.documents_masked,
        piece=piece,
        pieces=mesh.sizes["context"],
        whole=False,
        compiled=bool(job.compiled),
    )
    takes_positions = job.context is not None and job.context.positions and kept_apart is None
    with (
        context_parallel.given_positions(model, piece) if takes_positions else contextlib.nullcontext(),
        documents.stand_in_calls(kept_apart),
    ):
        recordings = capture(model, layers, input_form, job.precision, job.tensor)
    compare_recordings(job, recordings[True])
    if kept_apart is not None:
        _put_in_place(recordings.values(), documents.real_calls(kept_apart))
    elif job.context is not None:
        attention = context_parallel.torchs_attention(job)
        _put_in_place(recordings.values(), {F.scaled_dot_product_attention: attention})
    stage_codes = codes(recordings, [stage.modules[0] for stage in stages])
    return {index: CapturedPart(codes=stage_codes[index]) for index in indices}


def _put_in_place(recordings: Iterable[Recording], functions: Mapping[Any, Callable[..., Tensor]]) -> None:
    """Puts other functions in the place of these where they are called between layers."""
    for recording in recordings:
        for call in recording.calls:
            call.what = functions.get(call.what, call.what)
