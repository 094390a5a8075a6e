"""`dslc submit`: the script that follows from a plan, and what is refused before anything is handed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import dslc

JOB = """
model {
  network = [flatten(), linear(10)]
  loss    = cross_entropy()
}
data {
  source  = synthetic(samples = 320, shape = [4], classes = 10)
  batch   = 48
  workers = 2
}
devices {
  nodes = 2
  gpus  = 8
  kind  = h100
}
train {
  steps     = 100
  optimizer = sgd(lr = 0.1)
}
checkpoint {
  every = 20 steps
}
launch {
  with     = slurm(partition = "gpu", time = 26h, options = ["--exclusive", "--mem=0"])
  restarts = 3
}
"""


def submit(folder: Path, text: str, *more: str) -> tuple[int, str, str]:
    (folder / "job.plt").write_text(text)
    told = dslc("submit", "job.plt", "--dry-run", *more, cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["job.plt"]  # it leaves nothing
    return told.returncode, told.stdout, told.stderr


def test_the_script_follows_from_the_plan(tmp_path: Path) -> None:
    status, script, said = submit(tmp_path, JOB, "--out", "run")
    assert status == 0, said
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--job-name=job",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=24",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--time=1-02:00:00",
        "--open-mode=append",
        "--requeue",
        "--exclusive",
        "--mem=0",
        f"--output={tmp_path}/run/slurm.out",
    } <= set(options)
    assert sum(option.startswith("--mem") for option in options) == 1  # the job's own counts
    assert any(option.startswith("--signal=USR1@") for option in options)
    assert 'dslc run "$run/job.plt" --out "$run"' in script and "--restarts 3 --requeue" in script


def test_a_sweep_is_an_array_with_a_folder_for_each_value(tmp_path: Path) -> None:
    sweep = "sweep {\n  train.optimizer.lr = [0.1, 0.2, 0.3]\n}\n"
    status, script, said = submit(tmp_path, JOB + sweep, "--out", "run")
    assert status == 0, said
    assert "#SBATCH --array=0-2\n" in script and f"  {tmp_path}/run/lr=0.2\n" in script
    assert f"#SBATCH --output={tmp_path}/run/slurm-%a.out\n" in script


@pytest.mark.parametrize(
    "setting, code",
    [
        ("launch.with=local()", "E0817"),
        ("checkpoint.resume=here", "E0818"),
        ("launch.with.time=2min", "E0819"),
        ("data.batch=47", "E0301"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_handed_over(tmp_path: Path, setting: str, code: str) -> None:
    (tmp_path / "here" / "step-00000050").mkdir(parents=True)
    (tmp_path / "job.plt").write_text(JOB)
    told = dslc("submit", "job.plt", "--set", setting, "--set", "launch.restarts=0", cwd=tmp_path)
    assert told.returncode == 1 and f"error[{code}]" in told.stderr, told.stderr
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_is_not_here_leaves_a_script_to_hand_over(tmp_path: Path) -> None:
    (tmp_path / "job.plt").write_text(JOB)
    told = dslc("submit", "job.plt", "--out", "run", cwd=tmp_path, env={"PATH": ""})
    assert told.returncode == 2 and f"there is no `sbatch` here: type `sbatch {tmp_path}/run/submit.sh`" in told.stderr
    assert (tmp_path / "run" / "submit.sh").exists() and "waiting" in dslc("status", tmp_path / "run").stdout
