"""Real processes for tests: `gang(ranks, work, …)` runs `work(rank, …)` in each and returns the results.

The processes come from a fork server that has torch loaded: a process forked from the test's own would hang in torch's
first parallel operation if the test has run one. A rank that fails, or gives nothing within `LIMIT` seconds, fails the
test.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dslc.compiler.placement import layout
from dslc.runtime.transport import gloo, hierarchical_group

LIMIT = 300  # a rank that hangs; a loaded machine takes a minute
# An optimizer loads torch._dynamo when it is created. What ranks of most tests import takes each of them a second.
_PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.optim",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "dslc.jobs.prepare_run",
    "dslc.runtime.data.sources.open_sources",
    "dslc.runtime.train",
)


def preload(*modules: str) -> None:
    """Starts the fork server with these modules loaded too, before the first gang."""
    forkserver.set_forkserver_preload([*_PRELOADED, *modules])
    forkserver.ensure_running()


def gang(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    limit: int = LIMIT,
    backend: str | None = None,
    of_node: int | None = None,
) -> list[Any]:
    """Returns the results of `work(rank, *arguments)` on each rank, which it has `limit` seconds for. Both must pickle;
    tensors are numpy arrays. `backend` carries their collectives (by default that of jobs), and `of_node` ranks count
    as on one host.
    """
    chosen = backend or layout.CPU_BACKEND, of_node or ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        made = [
            context.Process(target=_rank, args=(rank, ranks, folder, *chosen, pipes[rank][1], work, arguments))
            for rank in range(ranks)
        ]
        for process in made:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            return [_result(rank, ours, limit) for rank, (ours, _) in enumerate(pipes)]
        finally:
            for process in made:
                process.kill()
                process.join()


def _result(rank: int, ours: Connection, limit: int) -> Any:
    assert ours.poll(limit), f"rank {rank} gave nothing within {limit} s"
    failure, result = ours.recv()
    assert failure is None, f"rank {rank}:\n{failure}"
    return result


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    backend: str,
    of_node: int,
    pipe: Connection,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    gloo.short_names()
    hierarchical_group.register(rank // of_node)
    try:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT))
        answer: tuple[str | None, Any] = (None, work(rank, *arguments))
        dist.barrier()
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send(answer)
    os._exit(0)  # gloo's threads at the interpreter's end are not under test
