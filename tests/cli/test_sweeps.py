"""Sweeps: nine trainings of 3 x 3 values, one after another or several at once, killed, given again; their table."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import local_command, reach, started
from helpers.job_texts import job_text

from dslc.dsl.meaning.load import load_each
from dslc.jobs.prepare_run import folders_of
from dslc.runs.sweep_file import read_sweep
from dslc.runtime.process.records import read_metrics
from dslc.runtime.process.run_status import RunStatus, write_status
from dslc.sweeps.side_by_side import Needs, NotHeld, shared_out
from dslc.sweeps.table import CSV, rows_of, show_sweep, write_csv

OWN = '''
import json, os, pathlib, signal

class Trap:
    """Kills the command once, in the fifth training, and lets the ninth fail."""

    def after_step(self, context):
        folder = pathlib.Path(context.folder)
        here, sweep = folder.name, folder.parent
        if here == "lr=0.02,batch=16" and context.step == 5 and not (sweep / "killed").exists():
            (sweep / "killed").touch()
            os.kill(json.loads((sweep / ".dslc-lock").read_text())["pid"], signal.SIGKILL)
            signal.pause()
        if here == "lr=0.03,batch=24" and context.step == 2:
            raise ValueError("broken")
'''
JOB = job_text(
    data={"source": "synthetic(samples = 64, shape = [4], classes = 10)", "validation": "25%", "batch": 8},
    train={"steps": 6, "hooks": 'python("own:Trap")'},
    evaluate={"metrics": "[accuracy()]", "every": "2 steps"},
    checkpoint={"every": "2 steps", "asynchronous": "false"},
    sweep={"train.optimizer.lr": "[0.01, 0.02, 0.03]", "data.batch": "[8, 16, 24]"},
)


AT_ONCE = ("--parallel", "2") if len(os.sched_getaffinity(0)) > 1 else ()


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "grid.plt").write_text(JOB)
    return tmp_path / "grid.plt"


def states(folder: Path) -> list[str]:
    sweep = read_sweep(str(folder))
    assert sweep is not None
    return [row.standing.state for row in rows_of(str(folder), sweep)]


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / CSV, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_killed_sweep_of_nine_goes_on_where_it_was(job: Path, tmp_path: Path) -> None:
    """Nine jobs from 3 x 3 values, as a grid search on a cluster. A training that fails does not end the others."""
    command, out = ("run", job, "--out", tmp_path / "grid"), tmp_path / "grid"
    assert dslc(*command).returncode == -9
    assert states(out) == ["done"] * 4 + ["gone"] + ["waiting"] * 4
    (out / "lr=0.01,batch=8" / "weights.safetensors").write_text("not done again")
    again = dslc(*command, *AT_ONCE)
    assert again.returncode == 3, again.stdout + again.stderr
    begun = [line.endswith("done already") for line in again.stdout.splitlines() if line.startswith("run ")]
    assert begun == [True] * 4 + [False] * 5
    assert again.stdout.count("resumes after step 4") == 1 and "starts at the first step" not in again.stdout
    assert "ValueError: broken" in again.stderr and "to go on with what is left:  dslc run " in again.stderr
    assert [each["step"] for each in read_metrics(str(out / "lr=0.02,batch=16")) if each["split"] == "train"] == [
        1, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    found = table(out)
    assert [(each["train.optimizer.lr"], each["data.batch"]) for each in found] == [
        (rate, batch) for rate in ("0.01", "0.02", "0.03") for batch in ("8", "16", "24")
    ]
    assert [each["state"] for each in found] == ["done"] * 8 + ["failed"]
    for each in found[:8]:
        evaluated = [r for r in read_metrics(str(out / each["folder"])) if r["split"] == "validation"]
        best = min(evaluated, key=lambda record: float(record["loss"]))
        assert float(each["validation loss"]) == evaluated[-1]["loss"]
        assert float(each["best validation loss"]) == best["loss"]
        assert int(each["best validation loss: step"]) == best["step"]
        assert float(each["best validation accuracy"]) == max(r["accuracy"] for r in evaluated)
    other = dslc(*command, "--set", "train.steps=7")
    assert other.returncode == 2 and "holds a run of another job, or of this one with other settings" in other.stderr
    assert (out / "lr=0.01,batch=8" / "weights.safetensors").read_text() == "not done again"


# ----------------------------------------------------------------------------------------------------- several at once


@pytest.mark.skipif(not AT_ONCE, reason="two cores hold two trainings")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_those_that_run_at_once_end_together(job: Path, tmp_path: Path, number: int) -> None:
    out, settings = tmp_path / "grid", ["train.steps=1000000", "train.hooks=none", "sweep.data.batch=none"]
    words = [word for each in settings for word in ("--set", each)]
    with started(tmp_path, [local_command(["run", str(job), "--out", str(out), *AT_ONCE, *words])]) as (sweep,):
        for name in ("lr=0.01", "lr=0.02"):
            reach(out / name, 3, [sweep])
        os.kill(sweep.process.pid, number)
        status, text = sweep.end()
        sweep.wait_for_all()
    assert status == (130 if number == signal.SIGINT else -9), text
    assert states(out) == (["stopped"] * 2 if number == signal.SIGINT else ["gone"] * 2) + ["waiting"]
    if number == signal.SIGINT:
        assert "lr=0.01: stopped after " in text and "stopping each after its step" in text
        assert [Path(out / name / "checkpoints").is_dir() for name in ("lr=0.01", "lr=0.02")] == [True, True]


def needs(processes: int, *, gpu: bool = False, named: tuple[int, ...] = (), memory: int = 0) -> Needs:
    return Needs(processes=processes, gpu=gpu, named=named, memory=memory)


def test_trainings_have_cores_and_gpus_of_their_own() -> None:
    one, two = shared_out([needs(1), needs(2)], 2, [0, 2, 4, 6, 8], [], 0)
    assert (one.cores, two.cores, one.gpus) == ((0, 2), (4, 6), ())
    one, two = shared_out([needs(2, gpu=True)] * 3, 2, [0, 1], ["4", "GPU-8f", "6", "7", "9"], 0)
    assert (one.gpus, two.gpus) == (("4", "GPU-8f"), ("6", "7"))
    assert [place.cores for place in shared_out([needs(1, gpu=True)] * 3, 3, [0, 1], ["0", "1", "2"], 0)][2] == (0, 1)


@pytest.mark.parametrize(
    "each, count, said",
    [
        (needs(2), 3, "3 trainings of 2 processes each take 6 cores, and this machine has 4: --parallel 2 is the most"),
        (needs(3), 2, "take 6 cores, and this machine has 4: leave out --parallel"),
        (needs(1, gpu=True), 3, "3 trainings of 1 process each take 3 GPUs, and this machine has 2: --parallel 2 is"),
        (needs(1, gpu=True, named=(1,)), 2, "the job names its GPUs ([1]), which one training has at a time"),
        (needs(1, memory=6 << 30), 2, "2 trainings at once hold 12 GiB as planned, and this machine has 8 GiB"),
    ],
)
def test_what_the_machine_cannot_hold_is_refused(each: Needs, count: int, said: str) -> None:
    with pytest.raises(NotHeld, match=re.escape(said)):
        shared_out([each] * 4, count, range(4), ["0", "1"], 8 << 30)


@pytest.mark.parametrize(
    "words, said",
    [
        (("--set", "sweep.data.batch=none", "--set", "sweep.train.optimizer.lr=none"), "the job has no `sweep`"),
        (("--parallel", "9999"), "9 trainings of 1 process each take 9 cores"),
        (("--try",), "`--parallel` is for the trainings of a job's `sweep`"),
        (("--parallel", "none"), "none is not a number from 1 to 10,000"),
    ],
)
def test_a_wrong_number_at_once_is_refused(job: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    out = () if "--try" in words else ("--out", tmp_path / "grid")
    run = dslc("run", job, *out, "--parallel", "2", *words)
    if said.startswith("9 trainings") and len(os.sched_getaffinity(0)) >= 9:
        pytest.skip("this machine holds them")
    assert run.returncode == 2 and said in run.stderr, run.stderr
    assert not (tmp_path / "grid").exists()


# ---------------------------------------------------------------------------------------------------------- the table


def made(folder: Path) -> Path:
    """Makes the folder of a sweep by hand: a training that is done, one that runs, and one that waits."""
    folder.mkdir()
    runs = [["a=1", ["1"]], ["a=2", ["2"]], ["a=3", ["3"]]]
    told = {"job": "job.plt", "paths": ["train.a"], "runs": runs, "highest": {"loss": False, "accuracy": True}}
    (folder / "sweep.json").write_text(json.dumps(told))
    for name, state in (("a=1", "done"), ("a=2", "running")):
        (folder / name).mkdir()
        write_status(str(folder / name), RunStatus(state=state, step=4, steps=8))
        lines = [
            {"step": 2, "split": "clean", "loss": 0.5, "accuracy": 0.9, "own": 1.0, "seconds": 1.0},
            {"step": 4, "split": "train", "loss": 0.4, "lr": 0.1, "seconds": 2.0},
            {"step": 4, "split": "clean", "loss": None, "accuracy": 0.8, "own": 2.0, "each": [1, 2], "seconds": 90.0},
        ]
        text = "\n".join(map(json.dumps, lines))
        (folder / name / "metrics.jsonl").write_text(f"{text}\nno record\n")
    return folder


def test_the_table_is_made_from_the_folder_alone(tmp_path: Path) -> None:
    folder = made(tmp_path / "grid")
    screen = io.StringIO()
    assert show_sweep(str(folder), screen)
    lines = [" ".join(line.split()) for line in screen.getvalue().splitlines()]
    assert lines[1:] == [
        "a state clean loss clean accuracy clean own train loss best clean loss best clean accuracy time folder",
        "1 done not finite 0.8 2 0.4 0.5 at 2 0.9 at 2 1.5 min a=1",
        "2 running at 4/8 not finite 0.8 2 0.4 0.5 at 2 0.9 at 2 1.5 min a=2",
        "3 waiting a=3",
    ]
    assert write_csv(str(folder)) == str(folder / CSV)
    assert [each["state"] for each in table(folder)] == ["done", "running", "waiting"]
    assert table(folder)[0]["clean loss"] == "" and table(folder)[0]["best clean accuracy: step"] == "2"


def test_a_checkpoint_is_evaluated_with_the_settings_that_trained_it(tmp_path: Path) -> None:
    """The seed draws the data that are held out, so that those of another training give another loss."""
    data = {"source": "synthetic(samples = 64, shape = [4], classes = 10)", "validation": "25%", "batch": 8}
    job, out = tmp_path / "seeds.plt", tmp_path / "runs" / "seeds" / "one"
    job.write_text(job_text(data=data, train={"steps": 2}, sweep={"train.seed": "[1, 2]"}))
    assert dslc("run", job, "--out", out).returncode == 0
    asked = {"seed=1": ("--checkpoint", out / "seed=1"), "seed=2": ()}  # without one the newest is taken
    for name, which in asked.items():
        evaluated = dslc("evaluate", job, "--json", *which, cwd=tmp_path)
        wanted = next(each["loss"] for each in read_metrics(str(out / name)) if each["split"] == "validation")
        assert json.loads(evaluated.stdout)["loss"] == pytest.approx(wanted), name
        assert f"this one wrote the checkpoint: train.{name.replace('=', ' = ')}\n" in evaluated.stderr
    chosen = dslc("evaluate", job, "--set", "train.seed=2", cwd=tmp_path)
    assert chosen.returncode == 0 and not chosen.stderr
    (out / "seed=2" / "weights.safetensors").rename(tmp_path / "moved.safetensors")
    moved = dslc("evaluate", job, "--checkpoint", tmp_path / "moved.safetensors")
    assert "2 trainings; this is the first one, and `--set` chooses another: train.seed = 1\n" in moved.stderr


@pytest.mark.parametrize("text", ["", "[]", '{"job": "a"}', '{"job": "a", "paths": [], "runs": [1], "highest": {}}'])
def test_a_file_of_another_program_is_no_sweep(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    assert read_sweep(str(tmp_path)) is None and not show_sweep(str(tmp_path)) and write_csv(str(tmp_path)) == ""


def test_an_alternative_that_is_too_long_for_a_file_system_has_a_folder(tmp_path: Path) -> None:
    layers = "linear(128), relu(), " * 20
    sweep: dict[str, object] = {"model.network": f"[[{layers}linear(10)], [{layers}relu(), linear(10)]]"}
    data: dict[str, object] = {"source": "digits()", "batch": 8}
    (tmp_path / "job.plt").write_text(job_text(data=data, train={"steps": 2}, sweep=sweep))
    loaded, combinations = load_each(str(tmp_path / "job.plt"))
    folders = [Path(folder) for folder, _ in folders_of(loaded, combinations, str(tmp_path))]
    assert len(set(folders)) == len(combinations)
    for folder in folders:
        folder.mkdir()
