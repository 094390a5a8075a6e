"""`dslc ui`: what differs between jobs, what a page asks for, who may ask, and the page in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from helpers.browser import needs_chromium
from helpers.commands import dslc
from helpers.devtools import Browser
from helpers.launcher import DSLC
from helpers.paths import EXAMPLES, ROOT

from dslc.dsl.meaning.load import load
from dslc.dsl.meaning.write import anchored, write
from dslc.launching.run_state import Submission, write_submission
from dslc.runs.run_figures import MOST_POINTS
from dslc.runtime.process.records import NAME, Records
from dslc.runtime.process.run_status import RunStatus, write_status
from dslc.ui.job_differences import comparable_settings, differing_settings, job_settings, read_job
from dslc.ui.run_board import RunBoard
from dslc.ui.run_server import SCRIPTS, SHARED_SCRIPTS, RunServer, hosts

DIGITS = EXAMPLES / "digits.plt"
TSC = shutil.which("tsc")


def run_folder(runs: Path, name: str, *settings: str, state: str = "done", steps: int = 0) -> Path:
    """Makes a run directory, as a training of digits.plt with these settings leaves it after `steps` steps."""
    folder = runs / name
    (folder / "logs").mkdir(parents=True)
    loaded = load(str(DIGITS), settings)
    assert loaded.job is not None and not loaded.report.errors
    (folder / "job.plt").write_text(write(anchored(loaded.job)))
    write_status(str(folder), RunStatus(state=state, step=steps, steps=1000))
    add_records(folder, 1, steps)
    return folder


def add_records(folder: Path, first: int, last: int) -> None:
    records = Records(str(folder), first - 1)
    for step in range(first, last + 1):
        records.write({"step": step, "split": "train", "loss": 1 / step, "seconds": float(step)})
        if step % 4 == 0:
            records.write({"step": step, "split": "validation", "loss": abs(step - 6) / 10, "accuracy": step / 100})
    records.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for lr in ("0.01", "0.1", "1.0"):
        run_folder(tmp_path / "runs", f"lr={lr}", f"train.optimizer.lr={lr}", steps=8)
    return tmp_path / "runs"


def board_of(runs: Path) -> RunBoard:
    """Returns the runs of a folder, once all is read; each question looks at the files."""
    board = RunBoard(str(runs), pause=0)
    while not board.changes(0)["complete"]:
        pass
    return board


# ------------------------------------------------------------------------------------------------------ the data


def test_jobs_differ_in_fields_and_in_arguments_of_calls() -> None:
    words = [("data.batch=32",), ("train.optimizer=adamw(lr = 0.01)",), ("train.epochs=none", "train.steps=9")]
    jobs = []
    for settings in words:
        job = load(str(DIGITS), settings).job
        assert job is not None
        jobs.append(job_settings(job))
    differing = differing_settings(jobs)
    assert {"data.batch", "train.optimizer", "train.optimizer.lr", "train.epochs", "train.steps"} <= set(differing)
    assert not {"model.loss", "data.validation", "devices.cpus"} & set(differing)
    assert [job["train.optimizer"].text for job in jobs] == ["sgd", "adamw", "sgd"]
    assert (jobs[1]["train.optimizer.lr"].text, jobs[1]["train.optimizer.lr"].number) == ("0.01", 0.01)
    assert "train.optimizer.momentum" in jobs[0]  # of one of the calls alone: it differs if the call is the same
    assert not {"train.optimizer.momentum", "train.optimizer.betas"} & set(differing)
    without = dict(jobs[0])
    del without["train.optimizer.momentum"]
    assert differing_settings([jobs[0], without]) == ["train.optimizer.momentum"]
    comparable = comparable_settings(jobs)
    assert {"data.batch", "train.optimizer.lr"} <= comparable and "train.optimizer" not in comparable
    mixed = [load(str(DIGITS), [f"log.every={every}"]).job for every in ("2 steps", "1 epoch")]
    every = [job_settings(job) for job in mixed if job is not None]
    assert differing_settings(every) == ["log.every"] and "log.every" not in comparable_settings(every)


def test_a_run_without_a_readable_job_is_listed(runs: Path) -> None:
    (runs / "lr=0.1" / "job.plt").write_text("of another version {")
    (runs / "lr=1.0" / "job.plt").unlink()
    assert read_job(str(runs / "lr=0.1")) is None
    changes = board_of(runs).changes(0)
    assert changes["names"] == ["lr=0.01", "lr=0.1", "lr=1.0"] and changes["differing"] == []


def test_trainings_of_a_sweep_that_have_not_begun_are_listed(tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "sweep"
    run_folder(sweep, "lr=0.1", "train.optimizer.lr=0.1", steps=8)
    content = {"job": "digits.plt", "paths": ["train.optimizer.lr"], "highest": {}}
    names = [(f"lr={text}", (text,)) for text in ("0.1", "1.0")]
    (sweep / "sweep.json").write_text(json.dumps(content | {"runs": names}))
    board = board_of(tmp_path / "runs")
    before = board.changes(0)
    assert before["names"] == ["sweep/lr=0.1", "sweep/lr=1.0"] and before["differing"] == ["train.optimizer.lr"]
    begun, waiting = before["runs"]
    assert waiting["settings"] == {"train.optimizer.lr": ["1.0", 1.0]} and waiting["last"] == {}
    assert (waiting["state"], waiting["line"], waiting["steps"]) == ("waiting", "waiting", 0)
    assert (begun["state"], board.curves(waiting["number"], "")["curves"]) == ("done", [])  # type: ignore[index]
    run_folder(sweep, "lr=1.0", "train.optimizer.lr=1.0", state="running", steps=4)
    (changed,) = board.changes(before["revision"])["runs"]
    assert (changed["number"], changed["state"], changed["step"]) == (waiting["number"], "running", 4)
    assert len(board_of(sweep / "lr=0.1").changes(0)["runs"]) == 1, "one run alone is not its sweep"


def test_only_what_has_changed_is_sent_again(runs: Path) -> None:
    board = board_of(runs)
    before = board.changes(0)
    assert before["differing"] == ["train.optimizer.lr"]
    first, *_ = before["runs"]
    assert first["settings"] == {"train.optimizer.lr": ["0.01", 0.01]} and first["line"].startswith(
        "done after 8 steps"
    )
    assert first["last"]["validation loss"] == pytest.approx(0.2) and first["best"]["validation accuracy"] == [0.08, 8]
    later = board.changes(before["revision"])
    assert later["runs"] == [] and later["names"] is None
    add_records(runs / "lr=0.1", 9, 12)
    changed = board.changes(before["revision"])
    assert [run["name"] for run in changed["runs"]] == ["lr=0.1"] and changed["names"] is None
    assert changed["runs"][0]["best"]["validation accuracy"] == [0.12, 12]
    run_folder(runs, "more", "data.batch=16", state="starting")
    shutil.rmtree(runs / "lr=0.01")
    last = board.changes(changed["revision"])
    assert last["names"] == ["lr=0.1", "lr=1.0", "more"] and last["differing"][0] == "data.batch"
    assert {run["number"] for run in last["runs"]} == {2, 3, 4}  # a number is that of one run


def test_curves_go_on_where_they_were(runs: Path) -> None:
    board, folder = board_of(runs), runs / "lr=0.1"
    first = board.curves(2, "")
    assert first is not None and first["anew"] and not first["more"]
    assert [curve["points"][-1][0] for curve in first["curves"]] == [8, 8, 8]
    nothing = board.curves(2, first["cursor"])
    assert nothing == {"cursor": first["cursor"], "anew": False, "more": False, "curves": []}
    with open(folder / NAME, "a", encoding="utf-8") as file:
        file.write('{"step": 9, "split": "train", "loss": 2.0}\n{"step": 10, "spl')
    next_records = board.curves(2, first["cursor"])
    assert next_records is not None and next_records["curves"] == [
        {"metric": "loss", "split": "train", "points": ((9, 2.0),)}
    ]
    assert not next_records["anew"]
    add_records(folder, 6, 7)  # a training that resumes after step 5 writes the file anew
    resumed = board.curves(2, next_records["cursor"])
    assert resumed is not None and resumed["anew"] and resumed["curves"][0]["points"][-1][0] == 7
    text = (folder / NAME).read_text()
    (folder / NAME).write_text(text.replace("seconds", "second") + text)  # anew and longer, and with the same inode
    rewritten = board.curves(2, resumed["cursor"])
    assert rewritten is not None and rewritten["anew"]
    for odd in ("x", "0.99999999999999999999", f"{first['cursor'].partition('.')[0]}.-1"):
        assert board.curves(3, odd)["anew"]  # type: ignore[index]


def test_a_file_that_is_written_anew_is_not_taken_for_one_that_has_grown(runs: Path) -> None:
    board, file = board_of(runs), runs / "lr=0.1" / NAME
    before, inode = board.changes(0), file.stat().st_ino
    file.write_text("".join(f'{{"step": {n}, "split": "train", "loss": 9, "other": 1}}\n' for n in range(1, 50)))
    (run,) = board.changes(before["revision"])["runs"]
    assert file.stat().st_ino == inode and run["last"] == {"train loss": 9, "train other": 1} and run["best"] == {}


def test_each_look_goes_on_where_the_last_one_stopped(runs: Path) -> None:
    board = RunBoard(str(runs), pause=0, patience=0)  # a line at each look
    for _ in range(9):
        looks = board.changes(0)
    assert [run["last"]["train loss"] for run in looks["runs"]] == [pytest.approx(1 / 3)] * 3
    with open(runs / "lr=0.1" / NAME, "w", encoding="utf-8") as file:
        file.write("no record\n" * 3 + "x" * (1 << 22) + "\n")
    answers, cursor = 0, ""
    while (part := board.curves(2, cursor)) is not None and part["more"]:
        assert part["curves"] == []
        answers, cursor = answers + 1, part["cursor"]
    assert answers >= 6


def test_lines_that_are_no_records_are_left_out(runs: Path) -> None:
    deep = "[" * 900 + "]" * 900
    with open(runs / "lr=0.1" / NAME, "a", encoding="utf-8") as file:
        file.write(f'[]\n{{"step": 9, "split": "train", "odd": {deep}}}\n{{"step": 10, "split": "train", "loss": 3}}\n')
    board = board_of(runs)
    curves = board.curves(2, "")
    assert curves is not None and curves["curves"][0]["points"][-1] == (10, 3)


def test_a_folder_whose_name_is_not_unicode_has_curves(runs: Path) -> None:
    (runs / "lr=1.0").rename(runs / os.fsdecode(b"lr=\xff"))
    board = board_of(runs)
    run = json.loads(json.dumps(board.changes(0)))["runs"][2]
    curves = board.curves(run["number"], "")
    assert curves is not None and len(curves["curves"]) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="root can list each folder")
def test_a_folder_that_cannot_be_listed_hides_no_other(runs: Path) -> None:
    (runs / "closed").mkdir(mode=0)
    assert board_of(runs).changes(0)["names"] == ["lr=0.01", "lr=0.1", "lr=1.0"]


def test_a_cluster_is_asked_at_times_and_not_at_each_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "runs", "first", state="running", steps=3)
    write_submission(str(folder), Submission(cluster="slurm", job="12", script="job.sh"))
    asked, commands = tmp_path / "asked", tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text(f"#!/bin/sh\necho >> {asked}\necho '12|RUNNING|None'\n")
    (commands / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(commands), prepend=os.pathsep)

    def line() -> str:
        (run,) = board.changes(0)["runs"]
        return str(run["line"])

    board = RunBoard(str(tmp_path / "runs"), pause=0, cluster_pause=3600)
    assert line() == "running in SLURM as job 12 at step 3 of 1000"
    for step in (4, 5):
        write_status(str(folder), RunStatus(state="running", step=step, steps=1000))
        assert f"step {step} " in line()
    write_status(str(folder), RunStatus(state="failed", step=5, steps=1000))
    assert line().startswith("failed") and asked.read_text() == "\n"
    board._cluster_due = 0.0
    assert line().startswith("restarting")  # its script starts it again
    write_status(str(folder), RunStatus(state="done", step=6, steps=1000))
    assert line().startswith("done") and asked.read_text() == "\n" * 2


def test_a_launcher_of_another_host_is_overdue_and_nothing_is_written(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runs / "lr=0.1" / "status.json"
    status = json.loads(file.read_text()) | {"state": "running", "place": "another", "host": "h"}
    file.write_text(json.dumps(status))

    def refuse(**_: object) -> None:
        raise AssertionError("a file is written")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    board = board_of(runs)
    assert board.changes(0)["runs"][1]["line"].startswith("running at step 8")
    os.utime(file, (0, 0))
    assert "process" in (line := board.changes(0)["runs"][1]["line"]) and "no sign of life" in line


def test_a_number_that_is_not_finite_is_null(runs: Path) -> None:
    with open(runs / "lr=0.1" / NAME, "a", encoding="utf-8") as file:
        file.write('{"step": 9, "split": "train", "loss": NaN}\n{"step": 10, "split": "train", "loss": 1e999}\n')
    board = board_of(runs)
    curves = board.curves(2, "")
    assert curves is not None and curves["curves"][0]["points"][-2:] == ((9, None), (10, None))
    json.dumps([curves, board.changes(0)], allow_nan=False)


def test_a_long_run_is_sent_in_parts_each_thinned(runs: Path) -> None:
    with open(runs / "lr=0.1" / NAME, "w", encoding="utf-8") as file:
        file.writelines(f'{{"step": {n}, "split": "train", "loss": {n % 7}}}\n' for n in range(1, 50_001))
    board = board_of(runs)
    cursor, steps, answers = "", list[int](), 0
    while True:
        part = board.curves(2, cursor)
        assert part is not None and part["anew"] == (cursor == "")
        (curve,) = part["curves"]
        assert len(curve["points"]) <= MOST_POINTS
        steps += [step for step, _ in curve["points"]]
        cursor, answers = part["cursor"], answers + 1
        if not part["more"]:
            break
    assert answers > 1 and steps == sorted(steps) and (steps[0], steps[-1]) == (1, 50_000)


# ---------------------------------------------------------------------------------------------------- the server


@pytest.fixture
def server(runs: Path) -> Iterator[RunServer]:
    with RunServer(str(runs), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def answer(server: RunServer, path: str, host: str = "", method: str = "GET", **values: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    headers = {"Host": host or f"127.0.0.1:{server.server_port}"}
    connection.request(method, f"{path}?{urlencode(values)}", headers=headers)
    reply = connection.getresponse()
    assert reply.getheader("Access-Control-Allow-Origin") is None
    text = reply.read().decode()
    connection.close()
    return reply.status, text


def test_nobody_gets_an_answer_without_the_token_and_the_name_of_the_server(server: RunServer) -> None:
    token = server.token
    assert server.address == f"http://127.0.0.1:{server.server_port}/?token={token}" and len(token) >= 32
    for path in ("/", "/runs", "/curves", "/job.plt"):
        for values in ({}, {"token": ""}, {"token": token[:-1]}, {"token": "é"}):
            status, text = answer(server, path, **values)
            assert status == 403 and "digits" not in text and "lr=" not in text
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "localhost:1"):
            status, text = answer(server, path, host, token=token)
            assert status == 403 and f"ssh -L {server.server_port}:" in text
            assert "ssh" not in answer(server, path, host)[1]
    assert hosts(80) == {"127.0.0.1", "127.0.0.1:80", "localhost", "localhost:80"}
    assert answer(server, "http://[/") == (400, "This is no address.\n")
    assert answer(server, "/", f"localhost:{server.server_port}", token=token)[0] == 200
    status, page = answer(server, "/", token=token)
    assert status == 200 and token not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_it_reads_runs_alone_and_writes_nothing(server: RunServer, runs: Path) -> None:
    token = server.token
    (runs.parent / "other").mkdir()
    (runs.parent / "other" / NAME).write_text('{"step": 1, "split": "train", "loss": 0.5}\n')
    files = {path: path.read_bytes() for path in runs.parent.rglob("*") if path.is_file()}
    assert answer(server, "/runs", token=token)[0] == 200
    assert answer(server, "/curves", token=token, run="2")[0] == 200
    for name in ("", "0", "-1", "4", "9" * 5000, "2\0", "lr=0.1", "..", "../other", str(runs.parent / "other")):
        assert answer(server, "/curves", token=token, run=name) == (404, "null")
    for path in ("/../other/metrics.jsonl", "/lr=0.1/job.plt", "/runs/", "/%2e%2e/other"):
        assert answer(server, path, token=token)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
        assert answer(server, "/runs", method=method, token=token)[0] == 501
    assert {path: path.read_bytes() for path in runs.parent.rglob("*") if path.is_file()} == files


# --------------------------------------------------------------------------------------------------- the command


def test_a_folder_without_runs_or_a_port_that_is_taken_is_refused(
    server: RunServer, runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    for folder, reason in (("empty", "there is no run in it"), ("absent", "there is no such folder")):
        refused = dslc("ui", tmp_path / folder)
        assert refused.returncode == 2 and f"{folder}: {reason}; `dslc run JOB`" in refused.stderr
    refused = dslc("ui", runs, "--port", server.server_port)
    assert refused.returncode == 2 and "cannot be used" in refused.stderr and "without --port" in refused.stderr
    assert dslc("ui", runs, "--port", "70000").returncode == 2


def test_it_prints_its_address_and_ctrl_c_ends_it(runs: Path) -> None:
    process = subprocess.Popen([DSLC, "ui", runs], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[-1]
        host, _, query = address.removeprefix("http://").partition("/?")
        assert process.stderr.readline() == "Ctrl-C ends it\n"
        connection = http.client.HTTPConnection(host)
        connection.request("GET", f"/runs?{query}")
        assert json.loads(connection.getresponse().read())["names"]
        connection.close()
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()  # it starts at once
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (0, "", "")


# ------------------------------------------------------------------------------------------------------ the page

CELLS = "[...document.querySelectorAll('#runs tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
POINTS_OF_RUN_4 = "document.querySelector('#curves figure:first-child .curve').getAttribute('points').split(' ').length"
LABELS = "[...document.querySelectorAll('#parallel [data-run]')].map((line) => line.ariaLabel)"
LEGENDS = "[...document.querySelectorAll('#curves figcaption')].map((each) => each.textContent)"


@pytest.mark.slow
@needs_chromium
def test_a_reader_compares_runs_that_train(server: RunServer, runs: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(server.address)
        browser.wait_for(f"{LABELS}.includes('run 3, lr=1.0, lr 1.0, best validation loss 0.2 at 4')")
        browser.wait_for(f"{LEGENDS}[0].includes('run 3 0.125')")
        heads = browser.evaluate("[...document.querySelectorAll('#runs thead th')].map((cell) => cell.textContent)")
        assert heads[:4] == ["curves", "run", "state", "lr"] and "best validation loss" in heads
        assert [row[1:4] for row in browser.evaluate(CELLS)] == [
            [f"lr={lr}", "done", lr] for lr in ("0.01", "0.1", "1.0")
        ]
        assert browser.evaluate("document.getElementById('status').textContent") == "3 runs: 3 done"
        assert browser.evaluate(LEGENDS)[0] == "train loss run 1 0.125run 2 0.125run 3 0.125"
        assert browser.evaluate("document.querySelectorAll('#curves figure').length") == 3

        # A run that is written while the page is open.
        folder = run_folder(runs, "late", "train.optimizer.lr=0.5", state="running", steps=3)
        browser.wait_for(f"{CELLS}.length === 4 && {LEGENDS}[0].includes('run 4 0.3333')")
        assert browser.evaluate(POINTS_OF_RUN_4) == 3
        records = Records(str(folder), 3)  # writes the file anew; then it grows
        for first, last in ((4, 10), (11, 20)):
            for step in range(first, last + 1):
                records.write({"step": step, "split": "train", "loss": 1 / step, "seconds": float(step)})
            records.write({"step": last, "split": "validation", "loss": 2 / last})
            browser.wait_for(f"{POINTS_OF_RUN_4} === {last}")
            assert f"run 4 {1 / last:g}" in browser.evaluate(LEGENDS)[0]
        records.close()
        write_status(str(folder), RunStatus(state="done", step=20, steps=20))
        browser.wait_for("document.getElementById('status').textContent === '4 runs: 4 done'")
        browser.wait_for(f"{LABELS}.includes('run 4, late, lr 0.5, best validation loss 0.1 at 20')")

        # What differs: axes, a line for each run, a part of an axis as a filter.
        titles = "[...document.querySelectorAll('.axis .title')].map((each) => each.textContent)"
        assert browser.evaluate(titles) == ["lr", "best validation loss"]
        assert len(browser.evaluate(LABELS)) == 4
        browser.evaluate(BRUSH)
        assert [row[1] for row in browser.evaluate(CELLS)] == ["late", "lr=1.0"]
        assert browser.evaluate("document.querySelectorAll('.line.dimmed').length") == 2
        assert "run 1" not in browser.evaluate(LEGENDS)[0] and "run 3" in browser.evaluate(LEGENDS)[0]
        assert browser.evaluate("document.getElementById('status').textContent").startswith("2 of 4 runs")
        browser.evaluate("document.querySelector('#filters h2 button').click()")
        assert len(browser.evaluate(CELLS)) == 4

        assert browser.evaluate(TYPED) == "0.25"
        assert len(browser.evaluate(CELLS)) == 4

        # Filters, order and curves by controls that a keyboard reaches.
        browser.evaluate("document.querySelector('#filters [data-focus=\"setting train.optimizer.lr 1.0\"]').click()")
        assert [row[1] for row in browser.evaluate(CELLS)] == ["late", "lr=0.01", "lr=0.1"]
        for _ in range(2):
            browser.evaluate("document.querySelector('[data-key=\"setting train.optimizer.lr\"] button').click()")
        assert [row[3] for row in browser.evaluate(CELLS)] == ["0.5", "0.1", "0.01"]
        assert browser.evaluate("document.querySelector('[aria-sort=descending]').textContent") == "lr"
        browser.evaluate("document.querySelector('#runs tbody input').click()")
        assert "run 4" not in browser.evaluate(LEGENDS)[0]
        focused = (
            "(() => { const lines = document.querySelectorAll('#parallel [data-run]'); lines[0].focus();"
            "lines[0].dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter', bubbles: true }));"
            "return document.activeElement.ariaPressed; })()"
        )
        pressed = browser.evaluate("document.querySelector('#parallel [data-run]').ariaPressed")
        assert browser.evaluate(focused) == {"true": "false", "false": "true"}[pressed]
        assert browser.evaluate("document.getElementById('readout').textContent").startswith("run ")

        for width, scheme in ((1600, "light"), (1024, "dark"), (480, "light")):
            browser.resize(width, 800, scheme)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
            ground = browser.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (ground == "rgb(255, 255, 255)") is (scheme == "light")
        server.shutdown()
        server.server_close()
        browser.wait_for("document.getElementById('status').textContent.startsWith('dslc ui has ended')")


# Types a number while another filter is set and cleared, takes it back, and returns what the field had before.
TYPED = """(() => {
  const [field] = document.querySelectorAll('#filters input[type=number]');
  const box = document.querySelector('#filters input[type=checkbox]');
  field.focus();
  field.value = '0.25';
  field.dispatchEvent(new Event('input'));
  box.click();
  box.click();
  const typed = document.activeElement === field && field.value;
  field.value = '';
  field.dispatchEvent(new Event('change'));
  return typed;
})()"""


# Marks the upper half of the first axis, from lr = 0.5 on.
BRUSH = """(() => {
  const grip = document.querySelector('.axis .grip'), { left, top, bottom } = grip.getBoundingClientRect();
  grip.setPointerCapture = () => {};
  const at = (share) => ({ clientX: left + 3, clientY: bottom - share * (bottom - top), pointerId: 1, bubbles: true });
  grip.dispatchEvent(new PointerEvent('pointerdown', at(0.7)));
  grip.dispatchEvent(new PointerEvent('pointermove', at(0.9)));
  grip.dispatchEvent(new PointerEvent('pointerup', at(1)));
})()"""


@pytest.mark.slow
@pytest.mark.skipif(TSC is None, reason="the compiler of TypeScript is not installed: npm install --global typescript")
def test_the_types_of_the_scripts_hold() -> None:
    options = "--noEmit --allowJs --checkJs --strict --target es2023 --lib es2023,dom,dom.iterable"
    scripts = [
        *(ROOT / "compiler/show/page" / name for name in SHARED_SCRIPTS),
        *(ROOT / "cli/ui" / name for name in SCRIPTS),
    ]
    run = subprocess.run([str(TSC), *options.split(), *map(str, scripts)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout
