"""The cause of a stall from the positions of the ranks: who is behind, and in what the others wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dslc.runtime.process.lifetime import handles_signal
from dslc.runtime.process.positions import (
    FOLDER,
    HostPositions,
    Phase,
    PositionDetails,
    PositionFile,
    RankPosition,
    Waits,
    forget_positions,
    position_number,
    read_positions,
)
from dslc.runtime.process.stall_cause import SILENT, explain
from dslc.runtime.process.stop import RunControl

LINES = {"model": "job.plt:4:3", "data": "job.plt:9:3"}


PLACE = ("step", "microbatches", "state", "status", "idle")


def rank(number: int, phase: Phase, waits: Waits = "", **found: Any) -> RankPosition:
    values = {name: found.pop(name) for name in PLACE if name in found}
    details = PositionDetails(since=1, waits=waits, **found)
    place = {"step": 12, "microbatches": 0, "seconds": 41.2, **values}
    return RankPosition(rank=number, phase=phase, details=details, **place)


def host(*ranks: RankPosition, name: str = "a", age: float = 0.0) -> HostPositions:
    gradients = "all-reduce of the gradients"
    return HostPositions(host=name, attempt=1, world=4, ranks=ranks, lines=LINES, gradients=gradients, age=age)


GATHER: dict[str, Any] = {
    "module": "blocks.7",
    "operation": "the all-gather of blocks.7",
    "line": "job.plt:4:30",
    "order": 8,
}
IN_LOAD: dict[str, Any] = {"python": "data.py:88, in load"}


def test_a_rank_in_code_of_the_users_is_behind_those_that_wait() -> None:
    waiting = [rank(number, Phase.FORWARD, "collective", **GATHER) for number in range(3)]
    behind = rank(3, Phase.SAMPLES, step=11, **IN_LOAD)
    (line,) = explain([host(*waiting), host(behind, name="b")])
    assert line == (
        "rank 3 (b) is before the all-gather of blocks.7, loading the samples of step 12 (job.plt:9:3); "
        "ranks 0 to 2 have waited in it for 41 s; rank 3's last line of Python is data.py:88, in load"
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (
            (rank(0, Phase.BACKWARD, "backward", microbatches=1), rank(1, Phase.FORWARD, state="gone", status=-9)),
            "rank 1 was ended by SIGKILL, in the forward pass of step 12 (job.plt:4:3); "
            "rank 0 has waited in the all-reduce of the gradients for 41 s",
        ),
        (
            (rank(0, Phase.FORWARD, state="suspended"), rank(1, Phase.BACKWARD, "backward", microbatches=1)),
            "rank 0 is stopped (SIGSTOP, Ctrl-Z or a debugger), in the forward pass of step 12",
        ),
        (
            (
                rank(0, Phase.FORWARD, state="failed", python="net.py:3, in forward"),
                rank(1, Phase.BACKWARD, "backward", state="failed"),
            ),
            "rank 0 has failed, in the forward pass of step 12 (job.plt:4:3); rank 1 has waited in",
        ),
        # Each waits; the one that is further has left out what the other waits in.
        (
            (rank(0, Phase.FORWARD, "collective", **GATHER), rank(1, Phase.RECORD, "collective", operation="the x")),
            "rank 1 did not take part in the all-gather of blocks.7 of step 12 (job.plt:4:30): "
            "rank 0 has waited in the all-gather of blocks.7 for 41 s; rank 1 has waited in the x for 41 s",
        ),
        (
            (
                rank(0, Phase.FORWARD, "collective", **GATHER),
                rank(1, Phase.FORWARD, "collective", **{**GATHER, "operation": "the all-gather of head", "order": 9}),
            ),
            "rank 1 did not take part in the all-gather of blocks.7 of step 12",
        ),
        # All have joined one exchange, or nobody can tell them apart.
        (
            (rank(0, Phase.FORWARD, "collective", **GATHER), rank(1, Phase.FORWARD, "collective", **GATHER)),
            "all ranks wait in the all-gather of blocks.7, in the forward pass of step 12 (job.plt:4:30), for 41 s: a "
            "connection between them is cut or stuck",
        ),
        (
            (
                rank(0, Phase.RECORD, "collective", operation="the x"),
                rank(1, Phase.RECORD, "collective", operation="y"),
            ),
            "the ranks wait in different exchanges: ",
        ),
        # The stages of a pipeline stand at different places where one has lost its connection.
        (
            (
                rank(0, Phase.PASSES, "collective", operation="the exchange of 0B2"),
                rank(1, Phase.PASSES, "collective", operation="the exchange of 1F3", microbatches=1),
            ),
            "the ranks wait in different exchanges: ",
        ),
        # The last stage alone counts losses.
        (
            (
                rank(0, Phase.PASSES, "collective", operation="the all-reduce of the gradients"),
                rank(1, Phase.PASSES, "collective", operation="the all-reduce of the gradients", microbatches=4),
            ),
            "all ranks wait in the all-reduce of the gradients, in the passes of step 12 ",
        ),
        # A rank that is within a library is named only where no other is in code of the user's.
        (
            (
                rank(0, Phase.FORWARD),
                rank(1, Phase.FORWARD, **IN_LOAD),
                rank(2, Phase.BACKWARD, "backward", microbatches=1),
            ),
            "rank 1 is before the all-reduce of the gradients, in the forward pass of step 12 (job.plt:4:3); rank 2",
        ),
        # A rank ahead of the exchange has left it out.
        (
            (
                rank(0, Phase.PASSES, "collective", operation="the exchange of a message"),
                rank(1, Phase.PASSES, **IN_LOAD),
            ),
            "rank 1 is in the passes of step 12 (job.plt:4:3); rank 0 has waited in the exchange of a message "
            "for 41 s; rank 1's last line of Python is data.py:88, in load",
        ),
        (
            (rank(0, Phase.FORWARD, "collective", **GATHER), rank(1, Phase.FORWARD, step=13, **IN_LOAD)),
            "rank 1 is past the all-gather of blocks.7, in the forward pass of step 13",
        ),
    ],
)
def test_the_cause(ranks: tuple[RankPosition, ...], words: str) -> None:
    assert explain([host(*ranks)])[0].startswith(words)


def test_no_cause_is_named_where_a_position_is_not_known() -> None:
    unknown = replace(rank(1, Phase.FORWARD), details=None)
    lines = explain([host(rank(0, Phase.BACKWARD, "backward", microbatches=1), unknown, replace(unknown, rank=2))])
    assert lines == [
        "rank 0 is waiting in the all-reduce of the gradients, in the backward pass of step 12 (job.plt:4:3)",
        "ranks 1, 2 are in the forward pass of step 12 (job.plt:4:3)",
    ]


@pytest.mark.parametrize("idle", [True, False])
def test_a_backward_pass_that_computes_is_no_cut_connection(idle: bool) -> None:
    ranks = [rank(number, Phase.BACKWARD, "backward", microbatches=1, idle=idle) for number in (0, 1)]
    assert ("a connection between them is cut" in explain([host(*ranks)])[0]) == idle


def test_a_host_that_writes_nothing_is_the_cause_only_while_the_run_lives() -> None:
    hosts = [
        host(rank(0, Phase.BACKWARD, "backward", microbatches=1)),
        host(replace(rank(1, Phase.FORWARD), details=None), name="b", age=SILENT + 5),
    ]
    (line,) = explain(hosts)
    assert line.startswith("rank 1 (b) gave its last sign of life 25 s ago, in the forward pass of step 12")
    assert "dead or cut off" not in "".join(explain(hosts, live=False))


def test_a_file_of_positions_is_read_back_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    board = RunControl(2)
    board.arrive(0)
    board.enter(0, 7)
    board.position_writer(0)(position_number(Phase.BACKWARD, 2))
    _, _, since = board.position(0)
    board.add_details(0, json.dumps({**vars(PositionDetails(since=since, module="head"))}))
    written = PositionFile(str(tmp_path), board, 2, LINES)
    written.update()
    ((found,), faults) = read_positions(str(tmp_path))
    assert not faults and (found.ranks[0].step, found.ranks[0].microbatches) == (7, 2)
    assert found.ranks[0].details is not None and found.ranks[0].details.module == "head"
    board.position_writer(0)(Phase.UPDATE)  # the details are of another position
    written.write(written.positions({1: -9}))
    ((found,), _) = read_positions(str(tmp_path))
    assert found.ranks[0].details is None and (found.ranks[1].state, found.ranks[1].status) == ("gone", -9)
    path = tmp_path / FOLDER / "rank-0.json"
    for text in ('{"host": 3}', "[", path.read_text().replace(f'"phase": {Phase.UPDATE}', '"phase": 99')):
        path.write_text(text)
        hosts, (fault,) = read_positions(str(tmp_path))
        assert not hosts and fault.startswith(f"{path} cannot be read: ")
    os.remove(path)
    os.mkfifo(path)
    assert read_positions(str(tmp_path))[1]


def test_files_of_an_earlier_start_are_left_out(tmp_path: Path) -> None:
    board = RunControl(2)
    PositionFile(str(tmp_path), board, 4, LINES).update()
    board.start_again(2, 2)
    PositionFile(str(tmp_path), board, 4, LINES).update()
    (found,), _ = read_positions(str(tmp_path))
    assert found.attempt == 2 and [place.rank for place in found.ranks] == [2, 3]


def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "rank-0.json").write_text("theirs")
    (tmp_path / FOLDER).symlink_to(theirs)
    PositionFile(str(tmp_path), RunControl(1), 1, LINES).update()
    assert (theirs / "rank-0.json").read_text() == "theirs"
    forget_positions(str(tmp_path))
    assert (theirs / "rank-0.json").read_text() == "theirs" and not (tmp_path / FOLDER).exists()
    PositionFile(str(tmp_path), RunControl(1), 1, LINES).update()
    assert [found.host for found in read_positions(str(tmp_path))[0]]


def test_a_process_without_a_handler_is_not_asked_for_its_stack() -> None:
    with subprocess.Popen(["sleep", "60"]) as plain:
        assert not handles_signal(plain.pid, signal.SIGUSR1)
        plain.kill()
    assert not handles_signal(plain.pid, signal.SIGUSR1), "it is gone"
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    assert handles_signal(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
