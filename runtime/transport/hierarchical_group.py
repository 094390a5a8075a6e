"""Groups of `devices.backend = shared_memory`: on one host, or over several, with gloo between them.

Model: each rank writes into the store on which host it is. A group on one host is a `SharedMemoryGroup`. A group with
the same number of ranks, two or more, on each of several hosts is a `HierarchicalGroup`. A rank has a place on its
host, and a counterpart at the same place on every other host. A sum is first taken on each host, where every rank gets
its share; counterparts sum their share over gloo; the shares are gathered on the host. All-gathers, reduce-scatters and
broadcasts go the same ways. What the ranks of a host send to other hosts falls to the least: of an all-reduce twice
(hosts - 1) / hosts of its bytes, of a reduce-scatter or an all-gather half of this.

Contract: a sum is taken in the order of the ranks of each host; over hosts in their order, or in gloo's for an
all-reduce. It is the same on every rank and in every run. A collective goes on in a thread of its group, one after
another, and is completed by its `wait`. A group is gloo's on all its ranks if it has one rank, if its hosts have
unequal numbers of ranks or one each, or if ranks on one of its hosts cannot map each other's memory.

Limits: exchanges in which no byte between hosts is saved are gloo's: all-to-all, messages, gather, scatter, reduce and
barrier. Ranks of two nodes of a plan count as on two hosts, even if one machine runs both.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ReduceOp, Store, Work
from torch.futures import Future

from dslc.runtime.transport.shared_memory import (
    NAME,
    Options,
    PythonGroup,
    SharedMemoryGroup,
    combine,
    flat_values,
    operation_of,
)
from dslc.runtime.transport.shared_segment import host_name, open_segments, release

Hosts: TypeAlias = Sequence[Sequence[int]]  # the ranks of each host, in order
GlooGroup: TypeAlias = Any  # torch's stubs do not know its collectives


def register(node: int = 0) -> None:
    """Makes `shared_memory` a name of torch's for a backend, in a rank on a node of the plan. A second call does no
    harm.
    """

    def open_group(store: Store, rank: int, ranks: int, timeout: datetime.timedelta) -> PythonGroup | GlooGroup:
        return _open_group(store, rank, ranks, timeout, node)

    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, open_group, devices=["cpu"])


def _open_group(store: Store, rank: int, ranks: int, timeout: datetime.timedelta, node: int) -> PythonGroup | GlooGroup:
    group = _shared_group(store, rank, ranks, timeout, node) if ranks > 1 else None
    return group or dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)


def _shared_group(store: Store, rank: int, ranks: int, timeout: datetime.timedelta, node: int) -> PythonGroup | None:
    """Returns a group that uses shared memory; None on all ranks if it cannot be had on one."""
    hosts = _hosts_of(store, rank, ranks, node)
    own = next(members for members in hosts if rank in members)
    if len(own) == 1 or any(len(members) != len(own) for members in hosts):
        return None
    place, seconds = own.index(rank), timeout.total_seconds()
    segments = open_segments(PrefixStore(f"host of {own[0]}", store), place, len(own))
    if len(hosts) == 1:
        return SharedMemoryGroup(segments, place, seconds) if segments is not None else None
    store.set(f"shares {rank}", "memory" if segments is not None else "")
    shares = [bool(store.get(f"shares {peer}")) for peer in range(ranks)]
    if segments is None or not all(shares):
        release(segments or ())
        return None
    local = SharedMemoryGroup(segments, place, seconds)
    counterparts = PrefixStore(f"place {place}", store)
    across = dist.ProcessGroupGloo(counterparts, hosts.index(own), len(hosts), timeout=timeout)
    flat = dist.ProcessGroupGloo(PrefixStore("all", store), rank, ranks, timeout=timeout)
    return HierarchicalGroup(hosts, rank, local, across, flat)


def _hosts_of(store: Store, rank: int, ranks: int, node: int) -> list[list[int]]:
    store.set(f"host {rank}", f"{node} {host_name()}")
    hosts: dict[bytes, list[int]] = {}
    for peer in range(ranks):
        hosts.setdefault(store.get(f"host {peer}"), []).append(peer)
    return list(hosts.values())


class _QueuedWork(Work):
    """A collective that a thread carries out."""

    def __init__(self, run: Callable[[], None], tensors: list[Any], observers: ExitStack) -> None:
        super().__init__()
        self._run: Callable[[], None] | None = run
        self._observers = observers
        self._tensors = tensors
        self._has_ended = threading.Event()
        self._error: BaseException | None = None
        self._end: Future[None] = Future()
        # Torch's own engines wait for a future, in which only a callback can raise.
        self._future: Future[list[Any]] = self._end.then(lambda end: self._result())

    def run(self) -> None:
        assert self._run is not None
        try:
            with self._observers:
                self._run()
        except BaseException as error:
            self._error = error
        self._run = None
        self._has_ended.set()
        self._end.set_result(None)

    def _result(self) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def wait(self, timeout: object = None) -> bool:
        self._has_ended.wait()
        self._result()
        return True

    def is_completed(self) -> bool:
        return self._has_ended.is_set()

    def result(self) -> list[Any]:
        return self._tensors

    def get_future(self) -> Future[list[Any]]:
        return self._future


class HierarchicalGroup(PythonGroup):
    """The ranks of a group that is on several hosts: `local` has the ranks of this host, `across` this rank and its
    counterparts, and `flat` has all.
    """

    def __init__(
        self,
        hosts: Hosts,
        rank: int,
        local: SharedMemoryGroup,
        across: GlooGroup,
        flat: GlooGroup,
    ) -> None:
        super().__init__(rank, sum(map(len, hosts)))
        self._hosts, self._local, self._across, self._flat = hosts, local, across, flat
        self._host_and_place = {
            member: (host, place) for host, members in enumerate(hosts) for place, member in enumerate(members)
        }
        self._place = self._host_and_place[rank][1]
        self._works: SimpleQueue[_QueuedWork] = SimpleQueue()
        threading.Thread(target=self._run_works, name="hierarchical group", daemon=True).start()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        for group in (self._local, self._across, self._flat):
            group.set_timeout(timeout)

    # ------------------------------------------------------------------------------------------------ sums

    def allreduce(self, tensors: list[Tensor], opts: Options = None) -> Work:  # type: ignore[override]
        operation, values = operation_of(opts), [flat_values(tensor) for tensor in tensors]

        def run() -> None:
            for each in values:
                self._reduce(each, operation)

        return self._queue("all_reduce", tensors, run, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options = None) -> Work:
        return self.allreduce(tensors, opts)

    def _reduce(self, values: Tensor, operation: ReduceOp.RedOpType) -> None:
        total = _total(operation)
        own = self._local.reduce_share(values, total)
        if own.numel():
            self._across.allreduce([own], total).wait()
        self._divide(own, operation)
        self._local.gather_shares(values)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None
    ) -> Work:
        parts = [list(flat_values(input).view(self.size(), -1)) for input in inputs]
        return self._reduce_scatter(outputs, inputs, parts, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options = None) -> Work:  # type: ignore[override]
        observed = [part for parts in inputs for part in parts]
        return self._reduce_scatter(
            outputs, observed, [[flat_values(part) for part in parts] for parts in inputs], opts
        )

    def _reduce_scatter(
        self, outputs: list[Tensor], observed: list[Tensor], inputs: list[list[Tensor]], opts: Options
    ) -> Work:
        operation, values = operation_of(opts), [flat_values(output) for output in outputs]

        def run() -> None:
            for output, parts in zip(values, inputs, strict=True):
                self._reduce_part(output, parts, operation)

        return self._queue("reduce_scatter", observed, run, outputs)

    def _reduce_part(self, output: Tensor, parts: list[Tensor], operation: ReduceOp.RedOpType) -> None:
        """Puts the sum of this rank's part into `output`. gloo's own reduce-scatter would send twice the bytes."""
        if not output.numel():
            return
        total = _total(operation)
        sums = output.new_empty((len(self._hosts), output.numel()))  # of this host, for each counterpart
        for own, members in zip(sums, self._hosts, strict=True):
            self._local.reduce_parts(own, [parts[member] for member in members], total)
        arrived = torch.empty_like(sums)
        self._across.alltoall_base(_bytes(arrived.view(-1)), _bytes(sums.view(-1)), [], []).wait()
        combine(output, list(arrived), total)
        self._divide(output, operation)

    def _divide(self, values: Tensor, operation: ReduceOp.RedOpType) -> None:
        if operation == ReduceOp.AVG:
            values.div_(self.size())

    # ------------------------------------------------------------------------------------------------ gathering

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Options = None) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        return self._gather([list(flat_values(output).view(self.size(), -1)) for output in outputs], inputs, outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:  # type: ignore[override]
        return self._gather([[flat_values(part) for part in parts] for parts in outputs], inputs, outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options = None) -> Work:
        parts = [[flat_values(of_rank[n]) for of_rank in outputs] for n in range(len(inputs))]
        return self._gather(parts, inputs, outputs)

    def _gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], result: list[Any]) -> Work:
        values = [flat_values(input) for input in inputs]

        def run() -> None:
            for parts, own in zip(outputs, values, strict=True):
                if own.numel():
                    self._gather_parts(parts, own)

        return self._queue("all_gather", inputs, run, result)

    def _gather_parts(self, parts: list[Tensor], own: Tensor) -> None:
        counterparts = [parts[members[self._place]] for members in self._hosts]
        self._across.allgather([[_bytes(part) for part in counterparts]], [_bytes(own)]).wait()
        for part, members in zip(counterparts, self._hosts, strict=True):
            self._local.gather_parts([parts[member] for member in members], part)

    def broadcast(self, tensors: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        values = [flat_values(tensor) for tensor in tensors]
        host, place = self._host_and_place[opts.rootRank]

        def run() -> None:
            for each in values:
                if each.numel() and place == self._place:
                    self._across.broadcast([_bytes(each)], _root(host)).wait()
                self._local.spread(each, place)

        return self._queue("broadcast", tensors, run, tensors)

    # ------------------------------------------------------------------------------------------------ gloo's own

    def reduce(self, tensors: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        return self._pass_on("reduce", tensors, lambda: self._flat.reduce(tensors, opts))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Options) -> Work:  # type: ignore[override]
        return self._pass_on("gather", inputs, lambda: self._flat.gather(outputs, inputs, opts))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Options) -> Work:  # type: ignore[override]
        return self._pass_on(
            "scatter", [part for parts in inputs for part in parts], lambda: self._flat.scatter(outputs, inputs, opts)
        )

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Options = None
    ) -> Work:
        return self._pass_on(
            "all_to_all", [input], lambda: self._flat.alltoall_base(output, input, output_sizes, input_sizes)
        )

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Options = None) -> Work:
        return self._pass_on("all_to_all", inputs, lambda: self._flat.alltoall(outputs, inputs))

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Work:
        return self._pass_on("send", tensors, lambda: self._flat.send(tensors, receiver, tag))

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Work:
        return self._pass_on("receive", tensors, lambda: self._flat.recv(tensors, sender, tag))

    def barrier(self, opts: Options = None) -> Work:
        return self._pass_on("barrier", [], lambda: self._flat.barrier())

    def monitored_barrier(self, timeout: object = None, wait_all_ranks: bool = False) -> None:
        self.barrier().wait()

    def _pass_on(self, kind: str, observed: list[Tensor], begin: Callable[[], Work]) -> Work:
        with self.observed(kind, observed):
            return begin()

    # ------------------------------------------------------------------------------------------------ the thread

    def _queue(self, kind: str, observed: list[Tensor], run: Callable[[], None], result: list[Any]) -> Work:
        work = _QueuedWork(run, result, self.observed(kind, observed))
        self._works.put(work)
        return work

    def _run_works(self) -> None:
        while True:
            work = self._works.get()
            work.run()
            del work  # and with it the tensors


def _total(operation: ReduceOp.RedOpType) -> ReduceOp.RedOpType:
    """Returns the operation on parts of a group: gloo has no mean."""
    return ReduceOp.SUM if operation == ReduceOp.AVG else operation


def _bytes(values: Tensor) -> Tensor:
    """Returns values as bytes, which gloo moves whatever their dtype is."""
    return values.view(torch.uint8)


def _root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options
