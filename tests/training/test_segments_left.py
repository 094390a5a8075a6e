"""However a training over shared memory ends, nothing is left: no process, no segment, no file."""

from __future__ import annotations

import contextlib
import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import sys
from collections import Counter
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.commands import dslc
from helpers.job_texts import job_text
from helpers.launcher import Launcher
from helpers.paths import TESTS
from helpers.segments import holders, segments_of

from dslc.runtime.transport import hierarchical_group, shared_memory
from dslc.runtime.transport.shared_segment import NAME

# A data set that notes its process, the launcher, and the segments, and ends the training from rank 1.
ENDING = f"""
import json, os, signal, sys, torch
sys.path.append({str(TESTS)!r})
from helpers.segments import segments_of

class Tokens(torch.utils.data.Dataset):
    def __init__(self, end: str):
        self.end, self.samples = end, 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if torch.distributed.is_initialized():
            self.samples += 1
            note = os.path.join(os.path.dirname(__file__), f"{{os.getpid()}}.json")
            with open(note + ".new", "w") as file:
                json.dump([[os.getpid(), os.getppid()], sorted(segments_of())], file)
            os.replace(note + ".new", note)
            if self.samples > 32 and torch.distributed.get_rank() == 1:
                if self.end == "raises":
                    raise RuntimeError("no more samples")
                if self.end.endswith("killed"):
                    os.kill(os.getpid() if self.end == "rank killed" else os.getppid(), signal.SIGKILL)
        return torch.arange(index, index + 16) % 32, torch.arange(index + 1, index + 17) % 32
"""


@pytest.mark.core
@pytest.mark.parametrize("end", ["launcher killed", "rank killed", "raises", "well"])
def test_nothing_is_left_of_a_training(launcher: Launcher, tmp_path: Path, end: str) -> None:
    (tmp_path / "ending.py").write_text(ENDING)
    job, temporary = tmp_path / "job.plt", tmp_path / "temporary"
    temporary.mkdir()
    job.write_text(
        job_text(
            model={"network": "gpt(layers = 1, width = 16, heads = 2, context = 16, vocab = 32)"},
            data={"source": f'python("ending:Tokens", end = "{end}")', "batch": 8},
            devices={"cpus": 2, "backend": "shared_memory"},
            train={"steps": 40},
        )
    )
    result = dslc("run", job, "--out", tmp_path / "run", env=dict(os.environ, TMPDIR=str(temporary)))
    assert (result.returncode == 0) == (end == "well"), result
    notes = [json.loads(note.read_text()) for note in tmp_path.glob("*.json")]
    processes = {process for of_note, _ in notes for process in of_note}
    segments = {segment for _, of_note in notes for segment in of_note}
    assert len(notes) == len(segments) == 2, "one of each rank"
    for process in processes - {os.getpid()}:
        _wait_for_end(process)
    assert not holders(segments)
    assert not list(temporary.iterdir())
    names = [name for name in os.listdir("/dev/shm") if any(str(process) in name for process in processes)]
    assert not names


def _wait_for_end(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        ending = os.pidfd_open(process)
        try:
            assert select.select([ending], [], [], 60)[0], f"process {process} is left"
        finally:
            os.close(ending)


def test_a_process_that_maps_a_segment_is_found() -> None:
    file = os.memfd_create(NAME)
    segment = os.fstat(file).st_ino
    assert holders({segment}) == {os.getpid(): {segment}}
    os.ftruncate(file, mmap.PAGESIZE)
    memory = mmap.mmap(file, mmap.PAGESIZE)
    os.close(file)
    assert holders({segment}) == {os.getpid(): {segment}}
    memory.close()
    assert not holders({segment})


# ------------------------------------------------------------------------------------------------------- groups alone

STARTS = 1000
ENDS = ("well", "raises", "kills itself", "is killed", "both are killed", "both are killed at their start")


def _rank(rank: int, folder: str, end: str, pipe: Connection) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the errors of each end, until the end
    torch.set_num_threads(1)
    hierarchical_group.register()
    pipe.send(None)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(shared_memory.NAME, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    assert isinstance(dist.group.WORLD, shared_memory.SharedMemoryGroup)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [2.0] * 3
    pipe.send(segments_of())
    while end != "well":
        if rank == 1 and end == "raises":
            raise RuntimeError("this rank fails")
        if rank == 1 and end == "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
    os._exit(0)


def _start_and_end(folder: Path, end: str) -> None:
    context: Any = multiprocessing.get_context("forkserver")
    folder.mkdir()
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    ranks = [context.Process(target=_rank, args=(n, str(folder), end, pipes[n][1])) for n in range(2)]
    for rank in ranks:
        rank.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        segments = _ended(end, [ours for ours, _ in pipes], ranks)
        for rank in ranks:
            rank.join(60)
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    kill = -signal.SIGKILL
    expected = {"well": [0, 0], "raises": [1, 1], "kills itself": [1, kill], "is killed": [1, kill]}
    assert codes == expected.get(end, [kill, kill])
    assert not holders(segments)


def _ended(end: str, pipes: list[Connection], ranks: list[Any]) -> set[int]:
    """Kills the ranks that are to be killed; returns the segments that were mapped."""
    for pipe in pipes:
        assert pipe.poll(60)
        pipe.recv()
    if end == "both are killed at their start":
        for rank in ranks:
            rank.kill()
        return set()
    of_ranks = []
    for pipe in pipes:
        assert pipe.poll(60)
        of_ranks.append(pipe.recv())
    assert of_ranks[0] == of_ranks[1] and len(of_ranks[0]) == 2
    for rank in ranks if end == "both are killed" else ranks[1:] if end == "is killed" else ():
        rank.kill()
    return set(of_ranks[0])


def _start_and_end_often(folder: Path, starts: int) -> Counter[str]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest", "hypothesis"])
    forkserver.ensure_running()
    draw, counts, names = random.Random(1), Counter[str](), set(os.listdir("/dev/shm"))
    for start in range(starts):
        end = ENDS[start] if start < len(ENDS) else draw.choice(ENDS)
        _start_and_end(folder / str(start), end)
        counts[end] += 1
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "dslc" in name or NAME in name]
    return counts


@pytest.mark.slow
def test_nothing_is_left_of_groups_that_end_in_any_way(tmp_path: Path) -> None:
    _start_and_end_often(tmp_path, len(ENDS))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nothing_is_left_of_a_thousand_starts_and_ends(tmp_path: Path) -> None:
    counts = _start_and_end_often(tmp_path, STARTS)
    print(*(f"{count:4} {end}" for end, count in counts.items()), sep="\n")
    assert counts.total() == STARTS and set(counts) == set(ENDS)
