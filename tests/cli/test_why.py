"""`dslc why`: the cause of a stall or of an end, from what lies in the folder of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from helpers.commands import dslc

from dslc.runtime.process.positions import FOLDER, Phase, PositionDetails, PositionFile, position_number
from dslc.runtime.process.run_status import RunStatus, write_status
from dslc.runtime.process.stop import RunControl


def test_a_folder_that_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write_status(str(tmp_path / "runs" / name), RunStatus(state="done", step=3))
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nowhere", "there is no such folder"),
        ("empty", "there is no run in it"),
        ("runs", "it holds 2 runs: name one"),
    ):
        told = dslc("why", tmp_path / name)
        assert told.returncode == 2 and words in told.stderr


def without_seconds(text: str) -> str:
    """Returns a text without its times, which go on."""
    return re.sub(r"for \d+ s", "for N s", text)


def test_a_stalled_run_names_the_rank_and_a_damaged_file_hides_no_other(tmp_path: Path) -> None:
    write_status(str(tmp_path), RunStatus(state="running", step=6, steps=9))
    board = RunControl(2)
    for rank, (phase, details) in enumerate(
        (
            (position_number(Phase.BACKWARD, 1), {"waits": "backward"}),
            (Phase.FORWARD, {"python": "data.py:88, in load", "module": "blocks.7", "line": "job.plt:4:3"}),
        )
    ):
        board.enter(rank, 7)
        board.position_writer(rank)(phase)
        _, _, since = board.position(rank)
        found = PositionDetails(since=since, **details)  # type: ignore[arg-type]
        board.add_details(rank, json.dumps(vars(found)))
    written = PositionFile(str(tmp_path), board, 4, {}, "all-reduce of the gradients")
    written.write(written.positions({}))
    path = tmp_path / FOLDER / "rank-0.json"
    content = json.loads(path.read_text())
    for place in content["ranks"]:
        place["seconds"] = 41.0
    path.write_text(json.dumps(content))
    (tmp_path / FOLDER / "rank-2.json").write_text("{")
    told = dslc("why", tmp_path)
    assert told.returncode == 0, told.stderr
    head, stalled, cause, unseen = without_seconds(told.stdout).splitlines()
    assert head.endswith("running at step 6 of 9") and stalled.startswith("no progress for N s")
    assert cause == (
        "rank 1 is before the all-reduce of the gradients, in the forward pass of step 7, in blocks.7 (job.plt:4:3); "
        "rank 0 has waited in it for N s; rank 1's last line of Python is data.py:88, in load"
    )
    assert unseen == "2 of 4 ranks write their positions elsewhere"
    assert f"{tmp_path}/{FOLDER}/rank-2.json cannot be read: " in told.stderr
    as_data = json.loads(dslc("why", tmp_path, "--json").stdout)
    assert (
        as_data["state"] == "running" and without_seconds(as_data["cause"][1]) == cause and len(as_data["hosts"]) == 1
    )


@pytest.mark.parametrize(
    ("state", "words"), [("running", "it has no file in positions/"), ("done", "done after 3 steps")]
)
def test_a_run_without_positions(tmp_path: Path, state: str, words: str) -> None:
    write_status(str(tmp_path), RunStatus(state=state, step=3, steps=9))
    told = dslc("why", tmp_path)
    assert told.returncode == 0 and words in told.stdout and len(told.stdout.splitlines()) == 1 + (state != "done")
