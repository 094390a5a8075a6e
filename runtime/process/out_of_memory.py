"""The plan's figures for a rank whose memory ran out, as a note in its failure."""

from __future__ import annotations

import re

import torch

from dslc.compiler.ir.number_text import byte_text
from dslc.compiler.ir.program import JobProgram
from dslc.runtime.process.error_text import error_text

_ON_A_CPU = re.compile(r"can't allocate memory|Cannot allocate memory|not enough memory")


def planned_memory(error: BaseException, job: JobProgram, rank: int) -> tuple[str, ...]:
    """Returns a note with what the plan gives the rank, if the error is that memory ran out; nothing for another error,
    or for a model that was not traced.
    """
    if not job.memory or not _is_of_memory(error):
        return ()
    memory = job.memory[rank * len(job.memory) // job.world_size]  # the pipeline axis is the outermost
    by_size = sorted(memory.kinds.items(), key=lambda item: -item[1])
    kinds = ", ".join(f"{kind} {byte_text(size)}" for kind, size in by_size if size)
    limit = f", of {byte_text(job.memory_limit)} that it may hold" if job.memory_limit else ""
    layers = ", ".join(f"{layer.name} {byte_text(layer.bytes)}" for layer in memory.layers)
    return (
        f"the plan expects it to hold {byte_text(memory.peak)} at its peak ({memory.when}){limit}: {kinds}",
        *([f"these layers hold most of the activations: {layers}"] if layers else []),
        f"between two steps it should hold {byte_text(memory.rest)}",
    )


def _is_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_ON_A_CPU.search(error_text(error)))
