"""Works around a data race in gloo's process groups.

Model: two threads of a process group write the name of the last collective into the same string, without a lock
(`ProcessGroupGloo::runLoop`, torch 2.13 to 2.15). A name of more than 15 letters is allocated, and both threads may
free it: the process then ends by SIGSEGV or SIGABRT, there or later. The one long name in a training is
ALLGATHER_COALESCED, of the operator behind `DTensor.full_tensor()` and the tensor axis.

Contract: after `short_names()` that operator gathers the same as ALLGATHER, gloo's name for an all-gather into one
tensor. Each rank calls it before its first collective; a second call does no harm.

Limits: the coalesced collectives that a user's own code calls keep their long names.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dslc.compiler.trace.private_torch import FUNCTIONAL_COLLECTIVES, gather_into, group_named
from dslc.runtime.transport.shared_memory import PythonGroup


@cache
def short_names() -> torch.library.Library:
    """Gives the functional all-gather a kernel for the CPU; returns the object that keeps it registered."""
    kernels = torch.library.Library(FUNCTIONAL_COLLECTIVES, "IMPL", "CPU")
    kernels.impl("all_gather_into_tensor", _all_gather)
    return kernels


def _all_gather(input: Tensor, ranks: int, group: object) -> Tensor:
    """Gathers the parts (n, …) of a group's ranks into (ranks * n, …); `_c10d_functional.wait_tensor` waits for it."""
    gathered = input.new_empty((ranks * input.size(0), *input.shape[1:]))
    parts, whole = input, gathered
    if input.is_complex():  # gloo has no complex numbers; the memory is the same
        parts, whole = torch.view_as_real(input), torch.view_as_real(gathered)
    known_group = group_named(group) if isinstance(group, str) else None
    if isinstance(known_group, PythonGroup):
        known_group.all_gather_single(whole, parts).wait()
    else:
        gather_into(whole, parts, ranks, group)
    return gathered
