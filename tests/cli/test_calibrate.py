"""`dslc calibrate`: real ranks measure the parts of a step, and plans predict with them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers.commands import dslc
from helpers.hosts import free_port
from helpers.job_texts import job_text
from helpers.launcher import DSLC
from helpers.waiting import until

from dslc.compiler.facts.calibration import (
    CONSTANTS,
    CONSTANTS_VERSION,
    Calibration,
    RunFit,
    calibration_text,
    fit_text,
    with_constants,
)
from dslc.compiler.facts.user_calibrations import calibration_path, this_machine, user_calibration, user_fit
from dslc.dsl.diagnostics import Report
from dslc.main import main
from dslc.runtime.process.records import NOTES

JOB = job_text(
    model={"network": "[flatten(), linear(16), relu(), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 64},
    devices={"cpus": 2},
    train={"steps": 4, "optimizer": "adamw(lr = 0.001)", "clip": 1.0},
)
GPT = JOB.replace(
    "[flatten(), linear(16), relu(), linear(10)]",
    "gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256)",
).replace("digits()", "synthetic(samples = 640, vocab = 256)")
HERE = 'devices.catalogue="here.toml"'


@pytest.mark.processes
def test_plans_predict_with_what_ranks_measured(tmp_path: Path) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    run = dslc("calibrate", "made.plt", "-o", "here.toml", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "1 and 1 more" not in run.stdout and "all_reduce 2 ranks" in run.stdout
    for settings in ([], ["parallelism.zero=3"], ["parallelism.microbatches=2"]):
        flags = [word for each in (HERE, *settings) for word in ("--set", each)]
        step = json.loads(dslc("plan", "made.plt", "--summary", *flags, cwd=tmp_path).stdout)["step"]
        assert step["source"] == "measured" and step["arithmetic"] > 0 and step["update"] > 0, step
        parts = sum(
            step[name] for name in ("arithmetic", "transfers", "waiting", "exposed", "update", "samples", "rest")
        )
        assert step["step_time"] == pytest.approx(parts)
    trained = dslc("run", "made.plt", "--out", "run", "--set", HERE, "--set", "log.every=1 step", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    times = json.loads((tmp_path / "run" / "report.json").read_text())["step_time"]
    assert times["predicted"] > 0 and times["measured"] > 0


@pytest.mark.processes
@pytest.mark.parametrize(
    "settings",
    (
        pytest.param(("parallelism.tensor=2",), marks=pytest.mark.slow),
        pytest.param(("parallelism.context=2",), marks=pytest.mark.long),
        pytest.param(("memory.recompute=selective", "parallelism.gradients=fp16()"), marks=pytest.mark.long),
        pytest.param(("parallelism.pipeline=2", "parallelism.microbatches=4"), marks=pytest.mark.long),
    ),
)
def test_a_plan_that_changes_layers_is_calibrated_as_it_is(tmp_path: Path, settings: tuple[str, ...]) -> None:
    (tmp_path / "made.plt").write_text(GPT)
    flags = [word for each in settings for word in ("--set", each)]
    run = dslc("calibrate", "made.plt", "-o", "here.toml", *flags, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    step = json.loads(dslc("plan", "made.plt", "--summary", *flags, "--set", HERE, cwd=tmp_path).stdout)["step"]
    assert step["source"] == "measured" and step["transfers"] == 0, step


@pytest.mark.long
@pytest.mark.processes
def test_each_stated_skew_is_calibrated_by_itself(tmp_path: Path) -> None:
    network = "llama(layers = 1, width = 16, heads = 2, context = 16, vocab = 256, experts = moe(4, 2, hidden = 16))"
    text = GPT.replace("gpt(layers = 2, width = 32, heads = 4, context = 16, vocab = 256)", network)
    (tmp_path / "made.plt").write_text(text)
    for skew, is_measured in ((1.5, True), (2, False)):
        flags = ["--set", "parallelism.expert=2", "--set", f"parallelism.expert_skew={skew}"]
        if is_measured:
            run = dslc("calibrate", "made.plt", "-o", "here.toml", *flags, cwd=tmp_path)
            assert run.returncode == 0, run.stderr
        planned = dslc("plan", "made.plt", "--summary", *flags, "--set", HERE, cwd=tmp_path)
        step = json.loads(planned.stdout)["step"]
        assert (step["source"] == "measured") == is_measured, step


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.processes
def test_a_job_with_auto_is_calibrated_by_a_plan_of_each_kind(tmp_path: Path) -> None:
    (tmp_path / "made.plt").write_text(GPT)
    searched = ("parallelism.zero", "parallelism.tensor", "parallelism.context", "parallelism.microbatches")
    settings = ("data.validation=10%", *(f"{path}=auto" for path in searched))
    flags = [word for each in settings for word in ("--set", each)]
    run = dslc("calibrate", "made.plt", "-o", "here.toml", *flags, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    kinds = [
        line.partition(" with ")[2].removesuffix(", for some seconds")
        for line in run.stdout.splitlines()
        if "measuring" in line
    ]
    few, many = "microbatches = 1", "microbatches = 4"
    zero = "zero = 3, "
    assert kinds == [
        "",
        *(f"`{kind}`" for kind in (many, zero + few, zero + many, "zero = 1", "tensor = 2", "context = 2")),
    ]
    assert " fsdp" in (tmp_path / "here.toml").read_text()
    choice = json.loads(dslc("choose", "made.plt", "--json", *flags, "--set", HERE, cwd=tmp_path).stdout)
    known = {plan["source"] for plan in choice["plans"] if "refused" not in plan}
    assert known == {"measured"} and len(choice["plans"]) > len(kinds)


@pytest.mark.parametrize(
    "setting, said",
    (
        ("parallelism.gradients=local_sgd(period=2)", "the times of `local_sgd` are not measured yet"),
        ("train.compile=true", "the parts of a compiled network are not measured yet"),
    ),
)
def test_what_cannot_be_calibrated_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made.plt").write_text(GPT)
    assert main(["calibrate", "made.plt", "-o", "here.toml", "--set", "train.clip=none", "--set", setting]) == 2
    assert f"cannot be calibrated: {said}" in capsys.readouterr().err and not Path("here.toml").exists()
    assert main(["calibrate", "made.plt", "-o", "nowhere/here.toml"]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


@pytest.mark.processes
def test_ranks_that_fail_leave_their_logs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\n"
        "def loss(output, target):\n"
        "    group = torch.distributed.is_initialized() and torch.distributed.get_backend()\n"
        "    assert group != 'gloo', 'no ranks here'\n"
        "    return torch.nn.functional.cross_entropy(output, target, reduction='none')\n"
    )
    (tmp_path / "made.plt").write_text(JOB.replace("cross_entropy()", 'python("own:loss")'))
    run = dslc("calibrate", "made.plt", "-o", "here.toml", cwd=tmp_path)
    assert run.returncode == 3 and "calibration failed on rank" in run.stderr and "no ranks here" in run.stderr
    log = run.stderr.partition("the whole log: ")[2].splitlines()[0]
    assert "no ranks here" in Path(log).read_text()
    shutil.rmtree(Path(log).parent.parent)


@pytest.mark.processes
def test_without_a_file_the_times_are_added_to_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without a catalogue predict with them."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    (tmp_path / "made.plt").write_text(JOB)
    here, path = this_machine(), Path(calibration_path("cpu", 2))
    path.parent.mkdir(parents=True)
    kept = Calibration(machine=here.processor, torch=here.torch, processes=2, cores=here.cores, updates={"sgd": 1e-9})
    path.write_text(calibration_text("cpu", kept, "made by hand"))
    run = dslc("calibrate", "made.plt", cwd=tmp_path)
    assert run.returncode == 0 and f"{path.relative_to(tmp_path)} written" in run.stdout, run
    merged = Report().collect(user_calibration("cpu", 2))
    assert merged is not None and {"sgd": 1e-9}.items() < merged.updates.items() and merged.layers
    plan = dslc("plan", "made.plt", "--summary", cwd=tmp_path)
    assert json.loads(plan.stdout)["step"]["source"] == "measured"


@pytest.mark.processes
@pytest.mark.parametrize("stage", (pytest.param("", marks=pytest.mark.long), "passes over"))
def test_an_interrupted_calibration_leaves_nothing(tmp_path: Path, stage: str) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    command = [str(DSLC), "calibrate", "made.plt", "-o", "here.toml"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)  # type: ignore[call-overload]
    assert run.stdout.readline().startswith("measuring made.plt on 2 ranks")

    def notes() -> str:
        assert run.poll() is None
        return "".join(path.read_text() for path in tmp_path.glob(f"dslc-calibrate-*/{NOTES}"))

    if stage:
        until(lambda: stage in notes())
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate()
    assert run.returncode == 130 and "the calibration was interrupted: nothing is written" in errors
    assert not [path for name in ("dslc*", "here*") for path in tmp_path.glob(name)]


@pytest.mark.processes
def test_a_terminal_shows_a_bar_and_ctrl_c_ends_the_ranks_too(tmp_path: Path) -> None:
    (tmp_path / "made.plt").write_text(JOB)
    environ = os.environ | {"TMPDIR": str(tmp_path), "TERM": "xterm"}
    child, terminal = pty.fork()
    if child == 0:
        try:
            os.chdir(tmp_path)
            os.execve(DSLC, [str(DSLC), "calibrate", "made.plt", "-o", "here.toml"], environ)
        finally:
            os._exit(127)
    screen = b""
    while b"passes over" not in screen:
        screen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")  # to all processes of the terminal
    with contextlib.suppress(OSError):  # the terminal of a process that has ended
        while text := os.read(terminal, 4096):
            screen += text
    shown = screen.decode()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130, shown
    assert (
        "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown and "the calibration was interrupted: nothing is written" in shown
    )
    assert "Traceback" not in shown
    assert not [path for name in ("dslc*", "here*") for path in tmp_path.glob(name)]


@pytest.mark.long
@pytest.mark.processes
def test_hosts_that_meet_measure_what_is_between_them(tmp_path: Path) -> None:
    """The coordinator writes the times, and removes the folder that both have."""
    (tmp_path / "made.plt").write_text(JOB.replace("cpus = 2", "cpus = 1\n  nodes = 2"))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [str(DSLC), "calibrate", "made.plt", "-o", "here.toml", "--rendezvous", f"127.0.0.1:{free_port()}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    hosts = [subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    shown = [host.communicate() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], shown
    assert "all_reduce 2 across hosts" in (tmp_path / "here.toml").read_text()
    assert not list(tmp_path.glob("dslc-calibrate-*"))
    plan = dslc("plan", "made.plt", "--summary", "--set", HERE, cwd=tmp_path)
    assert json.loads(plan.stdout)["step"]["source"] == "measured"


def test_constants_are_fitted_to_past_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs that cannot be fitted to are named, and left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Path("made.plt").write_text(JOB)
    sizes, runs = (64, 128, 256), []
    for size in sizes:
        assert main(["plan", "made.plt", "--json", "--set", f"data.batch={size}"]) == 0
        runs.append(f"run-{size}")
        Path(runs[-1]).mkdir()
        Path(runs[-1], "plan.json").write_text(capsys.readouterr().out)
        Path(runs[-1], "report.json").write_text(json.dumps({"step_time": {"measured": 0.002 + 2e-6 * size}}))
    assert main(["calibrate", "--from", runs[0], "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "nowhere has no report of a run" in error and "1 run can be fitted to, and 3 are the least" in error
    assert main(["calibrate", "--from", *runs]) == 0
    shown = capsys.readouterr().out
    assert "run-128   2.26 ms" in shown and "off by" in shown and "cpu.toml written" in shown, shown
    assert main(["plan", "made.plt", "--summary", "--set", "data.batch=192"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    assert step["source"] == "fitted" and step["step_time"] == pytest.approx(0.002384, rel=0.1)
    assert main(["calibrate", "made.plt", "--from", *runs]) == 2
    assert "leave a job out" in capsys.readouterr().err
    here, path = this_machine(), Path(calibration_path("cpu"))
    small = RunFit(machine=here.processor, torch=here.torch, cores=here.cores, constants=CONSTANTS_VERSION, runs=29)
    path.write_text(fit_text("cpu", with_constants(small, dict.fromkeys(CONSTANTS, 1e-5) | {"step": 2e-3}), "made"))
    for _ in range(2):  # the second time it begins with the constants of the small jobs, too
        assert main(["calibrate", "--from", *runs]) == 0
        fit = Report().collect(user_fit("cpu"))
        assert fit is not None and fit.typical == (1e-5,) * 13 + (2e-3,) and fit.cut == pytest.approx(1e-5), fit


def test_a_small_job_that_cannot_be_trained_here_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "all")
    assert main(["calibrate"]) == 3
    assert "dslc: OMP_NUM_THREADS is `all`, which is no number of threads, on " in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.processes
def test_constants_are_fitted_to_small_jobs(tmp_path: Path) -> None:
    run = dslc("calibrate", "-o", "here.toml", cwd=tmp_path)
    assert run.returncode == 0 and "gpt 4 x 128 on 2 with microbatches = 4" in run.stdout and not run.stderr, run
    (tmp_path / "made.plt").write_text(GPT)
    plan = dslc("plan", "made.plt", "--summary", "--set", HERE, cwd=tmp_path)
    assert json.loads(plan.stdout)["step"]["source"] == "fitted"
