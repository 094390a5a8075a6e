"""Records the collectives that a rank really runs in a step, at torch's dispatcher.

Model: every collective of gloo or NCCL goes through an operator of `c10d` or `_c10d_functional`, whatever the caller:
Python, the reducer of DistributedDataParallel in C++, `fully_shard` or a DTensor. Shared memory, whose group is in
Python, tells of its own. Each is counted once, by kind and by
the size of its group, with the bytes of this rank's input: for an all-gather its own part, for a reduce-scatter the
whole, for a broadcast the tensor, also on a rank that receives it. A message is a `send` on one rank and a `receive` on
the other.

Contract: only the stepper's own collectives count, not the collectives of logging, evaluation and checkpoints. A
training that is not profiled has no recorder, and pays nothing.

Limits: the first steps are not recorded. In these DistributedDataParallel lays out its buckets (after one backward
pass, or two of a static graph), and `fully_shard` learns its order. Within a group of one rank nothing is exchanged,
and nothing counted.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dslc.compiler.trace.private_torch import COLLECTIVE_SPACES, Operator, TorchDispatchMode, group_named, schema_of
from dslc.runtime.transport.shared_memory import OBSERVERS

FIRST_STEP, STEPS = 4, 3  # the steps recorded: steps 4, 5 and 6 of a process

_GROUP = ("process_group", "group_name")
_HANDED_IN = ("tensors", "tensor", "input", "inputs", "input_tensor", "input_tensors", "input_list")
# Matched by the beginning of an operator's name without underscores, which its variants (in place, coalesced, into one
# tensor) share.
_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "sharddimalltoall": "all_to_all",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "barrier": "barrier",
    "monitoredbarrier": "barrier",
}

_THREAD = threading.local()  # `is_seen`: this one is within an operator that was counted

T = TypeVar("T")
B = TypeVar("B")


@dataclass(frozen=True, kw_only=True)
class CollectiveExchange:
    """`count` collectives of one kind, in groups of `ranks`, with `bytes` of input in all."""

    operation: str
    ranks: int
    count: int
    bytes: int


_ASIDE = [0]  # nesting depth of `exclude_collectives` in this process


@contextmanager
def exclude_collectives() -> Iterator[None]:
    """Excludes the collectives in it, such as logging's, from the step."""
    _ASIDE[0] += 1
    try:
        yield
    finally:
        _ASIDE[0] -= 1


class Recorder(TorchDispatchMode):
    """Counts collectives while it is entered, also in the threads of the backward pass."""

    supports_higher_order_operators = True  # compiled code may use them: they pass through

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[tuple[str, int], tuple[int, int]] = {}

    def __enter__(self) -> Recorder:
        OBSERVERS.append(self._observe)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: object) -> None:
        OBSERVERS.remove(self._observe)
        super().__exit__(*failure)  # type: ignore[no-untyped-call]

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # it changes no computation, so compiled code stays in use

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(tensor_type not in (torch.Tensor, torch.nn.Parameter) for tensor_type in types):
            return NotImplemented  # a DTensor decomposes itself, and its collectives come here again
        if func.namespace not in COLLECTIVE_SPACES:
            return func(*args, **(kwargs or {}))
        self._see(func, args, kwargs or {})
        _THREAD.is_seen = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            _THREAD.is_seen = False

    @property
    def exchanges(self) -> tuple[CollectiveExchange, ...]:
        return tuple(
            CollectiveExchange(operation=operation, ranks=ranks, count=count, bytes=size)
            for (operation, ranks), (count, size) in sorted(self._found.items())
        )

    def _see(self, func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        names = [argument.name for argument in schema_of(func).arguments]
        named_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        group = next((named_arguments[name] for name in _GROUP if name in named_arguments), None)
        if group is None or (ranks := _size(group)) == 1:
            return  # waiting, for example, is no exchange
        name = schema_of(func).name.partition("::")[2]
        tensors = next(named_arguments[name] for name in _HANDED_IN if name in named_arguments)
        self._count(operation_of(name), ranks, list(_flat(tensors)))

    def _observe(self, operation: str, ranks: int, tensors: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
        """Counts a collective over shared memory, unless the operator behind which it runs was counted."""
        if ranks > 1 and not getattr(_THREAD, "is_seen", False):
            self._count(operation, ranks, tensors)
        return nullcontext()

    def _count(self, operation: str, ranks: int, tensors: Sequence[torch.Tensor]) -> None:
        if _ASIDE[0]:
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        count, total = self._found.get((operation, ranks), (0, 0))
        self._found[operation, ranks] = count + 1, total + (0 if operation == "barrier" else size)


def operation_of(name: str) -> str:
    return next((kind for start, kind in _KINDS.items() if name.replace("_", "").startswith(start)), name)


def _size(group: Any) -> int:
    if isinstance(group, str):
        return group_named(group).size()
    return (group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)).size()


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)


def _compiling_unseen() -> AbstractContextManager[object]:
    """Keeps the mode out of torch's compiler, for which DistributedDataParallel would lose its buckets (2.13)."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo.config.patch(optimize_ddp=False) if dynamo is not None else nullcontext()


def recorded(
    work: Callable[[B], T], keep: dict[int, tuple[CollectiveExchange, ...]], steps_before: int
) -> Callable[[B], T]:
    """Returns `work`, which does one step, wrapped so that the steps to be recorded are put into `keep` by their
    number.

    `steps_before` steps were done by earlier processes.
    """
    step = 0

    def watched(batch: B) -> T:
        nonlocal step
        step += 1
        if not FIRST_STEP <= step < FIRST_STEP + STEPS:
            return work(batch)
        with _compiling_unseen(), Recorder() as recorder:
            answer = work(batch)
        keep[steps_before + step] = recorder.exchanges
        return answer

    return watched
