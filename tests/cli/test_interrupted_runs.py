"""A training that was cut off is told from one that has ended, one that goes on, and one of another job."""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load
from dslc.jobs.prepare_run import LaunchContext, Ready, prepare
from dslc.launching.config_consistency import check_folder, facts_compared
from dslc.launching.elastic import _ElasticTraining
from dslc.launching.hosts import _member_folder
from dslc.launching.restart_detection import newest_of, starts_before
from dslc.runs.run_folder import LOCK, claim_folder
from dslc.runtime.hosts.connection import listen
from dslc.runtime.hosts.launcher_group import meet
from dslc.runtime.hosts.rendezvous import Rendezvous
from dslc.runtime.hosts.rendezvous_address import RendezvousError
from dslc.runtime.process.run_status import RunStatus, write_status


def kept_plan(name: str) -> str:
    """Returns what a launcher looks at of a plan on two nodes."""
    return json.dumps({"hash": name, "graph": {"nodes": [["nodes", {"record": "Machines", "count": 2}]]}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run directory of a training on 2 nodes that was started three times."""
    made = tmp_path / "runs" / "job" / "first"
    (made / "logs" / "attempt-2").mkdir(parents=True)
    (made / "logs" / "attempt-3").mkdir()
    (made / LOCK).touch()
    (made / "plan.json").write_text(kept_plan("abc"))
    write_status(str(made), RunStatus(state="running", step=7, steps=9))
    return made


def plan_of(nodes: int) -> str:
    return "abc" if nodes == 2 else ""


def test_a_training_that_was_cut_off_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts_before(str(folder), plan_of) == 3
    monkeypatch.chdir(folder.parents[2])
    assert newest_of("job", plan_of) == "runs/job/first" and newest_of("other", plan_of) == ""


def test_one_that_goes_on_holds_the_lock(folder: Path) -> None:
    with claim_folder(str(folder), None):
        assert starts_before(str(folder), plan_of) == 0


@pytest.mark.parametrize("state", ["done", "stopped", "failed", "waiting"])
def test_one_that_has_ended_is_over(folder: Path, state: str) -> None:
    write_status(str(folder), RunStatus(state=state))
    assert starts_before(str(folder), plan_of) == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", kept_plan("other")])
def test_another_plan_is_another_training(folder: Path, text: str) -> None:
    (folder / "plan.json").write_text(text)
    assert starts_before(str(folder), plan_of) == 0


def test_a_launcher_writes_to_no_folder_that_others_choose(tmp_path: Path) -> None:
    """But to its own `--out`, or without it to one that holds a training of its job."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, plan in ((ours, "our plan"), (theirs, "another plan")):
        folder.mkdir()
        (folder / "plan.json").write_text(kept_plan(plan))
    (tmp_path / "link").symlink_to(ours)

    def our_plan(nodes: int) -> str:
        return "our plan"

    for out in (None, str(ours), str(tmp_path / "link"), os.path.relpath(ours)):
        check_folder(str(ours), out, our_plan)
    for folder in (theirs, tmp_path, tmp_path / "none"):
        with pytest.raises(RendezvousError, match="where is no training of this job"):
            check_folder(str(folder), None, our_plan)
        with pytest.raises(RendezvousError, match="and --out names"):
            check_folder(str(folder), str(ours), our_plan)


def prepared(folder: Path, **blocks: dict[str, object]) -> Ready:
    report = Report()
    text = job_text(
        model={"network": "mlp(widths = [4])"},
        data={"source": "digits()", "batch": 8},
        train={"steps": 2, "optimizer": "sgd()"},
        **blocks,
    )
    (folder / "made.plt").write_text(text)
    ready = prepare(load(str(folder / "made.plt"), []), report, around=LaunchContext(hosts=True))
    assert ready is not None, report.found
    return ready


def test_a_member_writes_where_its_own_out_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = prepared(tmp_path, devices={"cpus": 1, "nodes": 2})
    theirs = str(tmp_path / "theirs")
    for out in (None, "theirs", theirs):
        assert _member_folder(ready, theirs, out, sees_folder=True) == theirs
    assert os.path.realpath(_member_folder(ready, theirs, "ours", sees_folder=True)) == str(tmp_path / "ours")
    assert _member_folder(ready, theirs, None, sees_folder=False) == str(tmp_path / "runs" / "made" / "theirs")


def test_a_member_of_an_elastic_training_refuses_a_folder_that_its_out_does_not_name(tmp_path: Path) -> None:
    """The coordinator says where the training is: over real connections, each launcher in a thread."""
    devices: dict[str, object] = {"cpus": 1, "nodes": "1..2"}
    ready = prepared(
        tmp_path, devices=devices, checkpoint={"every": "2 steps"}, launch={"restarts": 1, "timeout": "20s"}
    )
    with listen("127.0.0.1") as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as claims:
        meeting = [pool.submit(meet, Rendezvous(place, 2, {}, 20, host=f"host{n}")) for n in range(2)]
        coordinator, member = sorted((each.result() for each in meeting), key=lambda group: group.node)
        folders = {coordinator: str(tmp_path / "theirs"), member: str(tmp_path / "ours")}
        parts = [
            pool.submit(_ElasticTraining(ready, folder, claims).gathered, group) for group, folder in folders.items()
        ]
        error = parts[1].exception()
        member.close()
        parts[0].exception()
        coordinator.close()
    assert isinstance(error, RendezvousError), error
    assert str(error) == f"{coordinator.hosts[0]} trains in {tmp_path / 'theirs'}, and --out names {tmp_path / 'ours'}"
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("checkpoint", [None, {"every": "2 steps"}], ids=["without checkpoints", "with checkpoints"])
def test_hosts_compare_the_folder_that_out_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, str] | None
) -> None:
    """A launcher with another `--out` takes no place in this run, and the fact is named."""
    monkeypatch.chdir(tmp_path)
    blocks: dict[str, dict[str, object]] = {"checkpoint": dict(checkpoint)} if checkpoint else {}
    ready = prepared(tmp_path, devices={"cpus": 1, "nodes": 2}, **blocks)

    def differing(one: str | None, other: str | None) -> list[str]:
        ours, theirs = (dict(facts_compared(ready, out)) for out in (one, other))
        return [fact for fact in ours if ours[fact] != theirs.get(fact)]

    assert differing("run", "other") == differing(None, "run") == ["--out"]
    assert differing("run", "run") == differing(None, None) == []
    assert differing("run", str(tmp_path / "run")) == ([] if checkpoint else ["--out"]), "where all hosts write"
