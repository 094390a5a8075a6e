"""What of gloo's process groups has to be gone round.

Model: two threads of a group work its collectives off, and each writes the name of what it has just done into one
string of the group, without a lock (`ProcessGroupGloo::runLoop`, torch 2.13 to 2.15). A name of up to 15 letters fits
into the string itself. A longer one lies in memory of its own, which both threads may give back: the process then ends
by SIGSEGV or SIGABRT, there or anywhere later. It takes both within the same few nanoseconds: once in a million such
collectives on a busy machine. The one long name that a training comes by is ALLGATHER_COALESCED, which is what the
operator behind `DTensor.full_tensor()` and the tensor axis asks gloo for.

Contract: after `short_names()` that operator gathers the same as ALLGATHER, which is what gloo calls an all-gather into
one tensor. It is to be called in each rank before the first collective; it may be called again.

Limits: collectives that a user's own code asks for by their coalesced forms keep their long names.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def short_names() -> torch.library.Library:
    """Gives the functional all-gather a kernel for the CPU; what keeps it in place."""
    kernels = torch.library.Library("_c10d_functional", "IMPL", "CPU")
    kernels.impl("all_gather_into_tensor", _all_gather)
    return kernels


def _all_gather(input: Tensor, ranks: int, group: object) -> Tensor:
    """The parts (n, …) of the `ranks` ranks of a group, one after another: (ranks * n, …). Asynchronous: to be waited
    for by `_c10d_functional.wait_tensor`."""
    gathered = input.new_empty((ranks * input.size(0), *input.shape[1:]))
    parts, whole = input, gathered
    if input.is_complex():  # which gloo does not know; the memory is the same
        parts, whole = torch.view_as_real(input), torch.view_as_real(gathered)
    torch.ops._c10d_functional.all_gather_into_tensor_out(parts, ranks, group, out=whole)
    return gathered
