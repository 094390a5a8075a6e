"""Records the forward pass of a network that a function makes, and cuts it into the parts that stages run.

While calls are recorded, functions of one rank alone stand for attention that spans a context axis or stays within
documents; the parts call the real ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dslc.compiler.ir.program import JobProgram
from dslc.runtime.model import documents
from dslc.runtime.parallel import context_parallel
from dslc.runtime.parallel.mesh import mesh_of
from dslc.runtime.pipeline.input_form import InputForm
from dslc.runtime.pipeline.recording import Recording
from dslc.runtime.pipeline.stage import CapturedPart


def captured_parts(
    job: JobProgram, model: nn.Module, input_form: InputForm, indices: Sequence[int]
) -> dict[int, CapturedPart]:
    """Returns the parts of a user's own module that the stages `indices` run."""
    from dslc.runtime.pipeline.capture import capture
    from dslc.runtime.pipeline.captured import codes
    from dslc.runtime.pipeline.compare_recordings import compare_recordings

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
