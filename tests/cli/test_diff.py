"""`dslc diff` names the consequences of a change and no others; `--locked` fails for each cause, and names it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
from helpers.job_texts import job_text

from dslc.compiler.comparison import DERIVED, SAME_TRAINING, compare_plans
from dslc.compiler.compile import compile_plan
from dslc.compiler.facts.calibration import Calibration, calibration_text
from dslc.compiler.graph.plan_graph import PlanGraph
from dslc.dsl.diagnostics import Report
from dslc.dsl.meaning.load import load_text
from dslc.jobs.check_job import inspect
from dslc.main import main

MLP = job_text(
    model={"network": "[flatten(), linear(64), relu(), linear(10)]", "loss": "cross_entropy()"},
    data={"source": "digits()", "batch": 64, "validation": "20%"},
    devices={"cpus": 2},
    train={"epochs": 2, "steps": None, "optimizer": "adamw(lr = 0.001)"},
)
GPT = job_text(
    model={
        "network": "gpt(layers = 4, width = 32, heads = 4, context = 16, vocab = 256)",
        "loss": "cross_entropy()",
    },
    data={"source": "stdlib()", "batch": 16},
    devices={"cpus": 2},
    train={"steps": 20, "optimizer": "adamw(lr = 0.001)", "clip": 1.0},
)
BATCH = {"data.batch", "train.steps", "train.steps_per_epoch"}
MEMORY = {"memory"}
ENGINE = {"placement", "memory", "traffic"}
ONE_FIELD = [  # a job, a setting, the settings of the training that differ, and the sections that follow
    (MLP, "train.seed=7", {"train.seed"}, set()),
    (MLP, "train.optimizer.lr=0.01", {"train.optimizer.lr"}, set()),
    (MLP, "train.optimizer.weight_decay=0.1", {"train.optimizer.weight_decay"}, set()),
    (MLP, "train.clip=1.0", {"train.clip"}, set()),
    (MLP, "train.clip=value(0.5)", {"train.clip_value"}, set()),
    (MLP, "train.epochs=3", {"train.steps"}, set()),
    (MLP, "train.max_time=2h", {"train.max_time"}, set()),
    (
        MLP,
        "train.lr_schedule=warmup_cosine(warmup=2 steps)",
        {"train.lr_schedule.kind", "train.lr_schedule.warmup"},
        set(),
    ),
    (MLP, 'train.no_decay=["*.bias"]', {"train.optimizer.no_decay"}, set()),
    (GPT, "train.precision=bf16", {"train.precision.dtype"}, MEMORY),
    (MLP, "train.ema=0.99", {"train.ema"}, MEMORY),
    (MLP, "train.on_nonfinite=continue", {"train.on_nonfinite"}, set()),
    (MLP, "data.batch=32", BATCH, MEMORY | {"placement"}),
    (MLP, "data.shuffle=false", {"data.shuffle"}, set()),
    (MLP, "data.validation=10%", {"data.train_samples", "data.validation_samples", "data.last", *BATCH}, set()),
    (MLP, "data.workers=2", set(), {"placement"}),
    (MLP, "model.loss=cross_entropy(label_smoothing=0.1)", {"model.loss.label_smoothing"}, set()),
    (MLP, 'model.freeze=["1.*"]', {"model.frozen"}, {"placement", "memory", "traffic"}),
    (MLP, "parallelism.gradients=bf16()", {"parallelism.gradients.exchange"}, {"memory", "traffic"}),
    (MLP, "parallelism.zero=1", set(), ENGINE),
    (MLP, "parallelism.zero=3", set(), ENGINE),
    (MLP, "parallelism.microbatches=2", set(), {"placement", "memory"}),
    (MLP, "log.every=10 steps", set(), {"placement"}),
    (MLP, "log.tensorboard=true", set(), {"placement"}),
    (MLP, "checkpoint.every=5 steps", set(), {"placement"}),
    (MLP, "evaluate.every=1 epoch", set(), {"placement"}),
    (MLP, "devices.threads=2", set(), {"placement"}),
    (MLP, "launch.timeout=20 min", set(), {"placement"}),
    (GPT, "memory.recompute=full", set(), MEMORY | {"placement"}),
    (GPT, "parallelism.tensor=2", set(), ENGINE),
    (GPT, "parallelism.context=2", set(), ENGINE),
    (GPT, "parallelism.pipeline=2", set(), ENGINE | {"time"}),
]


@cache
def plan(job: str, *settings: str) -> PlanGraph:
    report = Report()
    analysis = inspect(load_text(job, settings=settings), report)
    assert analysis is not None and not report.errors, [each.message for each in report.errors]
    return compile_plan(analysis).graph


@pytest.mark.parametrize(("job", "setting", "settings", "others"), ONE_FIELD, ids=[row[1] for row in ONE_FIELD])
def test_one_field_has_its_consequences_and_no_others(
    job: str, setting: str, settings: set[str], others: set[str]
) -> None:
    changes = compare_plans(plan(job), plan(job, setting))
    trained = {change.what for change in changes if change.section == "training"}
    assert trained <= settings and (trained or not settings), (trained, settings)
    assert {change.section for change in changes} - {"training"} == others, changes
    assert all(change.before != change.after for change in changes)


@pytest.mark.parametrize("table", [SAME_TRAINING, DERIVED], ids=["same training", "derived"])
def test_every_field_that_is_left_out_exists(table: dict[type, set[str]]) -> None:
    for kind, names in table.items():
        assert names <= {field.name for field in fields(kind)}, kind


def test_other_modules_are_named() -> None:
    wider = "model.network=[flatten(), linear(32), relu(), linear(10)]"
    changes = {change.what: change for change in compare_plans(plan(MLP), plan(MLP, wider))}
    assert (changes["model.network: 1.out_features"].before, changes["model.network: 1.out_features"].after) == (64, 32)
    deeper = "model.network=[flatten(), linear(64), relu(), linear(64), relu(), linear(10)]"
    changes = {change.what: change for change in compare_plans(plan(MLP), plan(MLP, deeper))}
    assert (changes["model.network"].before, changes["model.network"].after) == ("5 modules", "7 modules")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.plt").write_text(MLP)
    return "job.plt"


def test_one_job_and_settings(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", job]) == 0
    assert capsys.readouterr().out == "job.plt  ->  job.plt: the same plan\n"
    assert main(["diff", job, "--set", "data.batch=32"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("job.plt  ->  job.plt --set data.batch=32: another training, in 3 settings\n")
    assert "checkpoints: those of the first do not fit: its global batch is 64, and the job's 32" in text
    assert "training\n" in text and "memory of a rank\n" in text and "traffic" not in text


def test_checkpoints_of_a_network_of_unknown_shapes(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    own = 'model.network=python("net:Net", width = {})'
    Path(job).write_text(MLP.replace("[flatten(), linear(64), relu(), linear(10)]", own.format(8).partition("=")[2]))
    for setting, misfits in ((own.format(16), None), ("train.clip=1.0", [])):
        assert main(["diff", job, "--set", setting, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["checkpoint_misfits"] == misfits


def test_the_training_of_a_sweep_that_is_compared_is_named(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("seeds.plt").write_text(MLP + "sweep {\n  train.seed = [0, 2]\n}\n")
    assert main(["diff", job, "seeds.plt"]) == 0
    said = "seeds.plt sweeps over 2 trainings; this is the first one, and `--set` chooses another: train.seed = 0\n"
    assert capsys.readouterr().err == said


def test_a_plan_file_and_a_run_directory(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", job, "--json"]) == 0
    Path("run").mkdir()
    Path("run/plan.json").write_text(capsys.readouterr().out)
    assert main(["diff", "run", "run/plan.json"]) == 0
    assert main(["diff", "run", job]) == 0
    assert main(["diff", "run", job, "--set", "parallelism.zero=3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert found["same_training"] and found["checkpoint_misfits"] == []
    peak = next(change for change in found["changes"] if change["what"] == "peak")
    assert peak["unit"] == "bytes" and peak["after"] < peak["before"]
    assert main(["diff", "run", "run", "--set", "data.batch=32"]) == 2
    assert "E1006" in capsys.readouterr().err


def test_a_job_at_a_revision_is_read_with_its_imports(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("base.plt").write_text("launch {\n  timeout = 7 min\n}\n")
    Path(job).write_text('import "base.plt"\n' + MLP)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", *command], check=True)
    Path("base.plt").write_text("train {\n  clip = 1.0\n}\n")
    assert main(["diff", f"HEAD:{job}", job, "--markdown"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("**`HEAD:job.plt` → `job.plt`: another training, in 1 setting**\n")
    assert "| train.clip | none | 1 |  |" in text and "| launch.timeout | 420 |" in text
    assert main(["diff", "HEAD:other.plt", job]) == 2
    assert "`HEAD:other.plt` cannot be read: HEAD has no such file" in capsys.readouterr().err
    assert main(["diff", "nothing:job.plt", job]) == 2
    assert "`nothing:job.plt` cannot be read: " in capsys.readouterr().err


def test_a_lock_names_each_cause(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", job, "--locked"]) == 1
    assert "E1007" in capsys.readouterr().err
    assert main(["plan", job, "--lock"]) == 0
    assert main(["check", job, "--locked"]) == 0
    lock = json.loads(Path("job.lock").read_text())
    Path(job).write_text(f"# a comment\n{MLP}")
    assert main(["check", job, "--locked"]) == 0, "the plan is the same"
    Path(job).write_text(MLP)
    capsys.readouterr()

    def causes(*settings: str, **changes: object) -> str:
        Path("job.lock").write_text(json.dumps(lock | {"without_lines": "0" * 16} | changes))
        assert main(["check", job, "--locked", *(word for setting in settings for word in ("--set", setting))]) == 1
        return capsys.readouterr().err

    assert "note: the version of dslc was 0.0.9, and is " in causes(dslc="0.0.9")
    assert "note: the job: job.plt has changed" in causes(texts=[["job.plt", "0" * 64]])
    assert "note: the job: base.plt is not read any more" in causes(texts=[*lock["texts"], ["base.plt", "0"]])
    assert "note: the job: the settings were none, and are --set train.seed=2" in causes("train.seed=2")
    hardware = lock["facts"]["hardware"] | {"efficiency": 0.5}
    assert "note: the catalogue: hardware.efficiency was 0.5, and is 1.0" in causes(
        facts=lock["facts"] | {"hardware": hardware}
    )
    source = lock["facts"]["source"] | {"samples": 3}
    assert "note: the facts: source.samples was 3, and is 1797" in causes(facts=lock["facts"] | {"source": source})
    assert "E1007" in causes(format=2)


def test_a_lock_names_a_changed_calibration(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A predicted time is locked if the job names the catalogue that it comes from; the hash of the plan leaves it out,
    by which hosts and resumed runs compare plans.
    """

    def calibrate(processes: int) -> None:
        times = Calibration(machine="made", torch="2.13", processes=processes, cores=2)
        Path("here.toml").write_text(calibration_text("cpu", times, "made by hand"))

    calibrate(3)
    settings = ["--set", 'devices.catalogue="here.toml"']
    assert main(["plan", job, "--lock", *settings]) == 0
    assert main(["check", job, "--locked", *settings]) == 0
    before = json.loads(Path("job.lock").read_text())
    calibrate(4)
    capsys.readouterr()
    assert main(["check", job, "--locked", *settings]) == 1
    shown = capsys.readouterr().err
    assert "E1008" in shown and "the time that the plan of job.plt predicts is not the one in job.lock" in shown
    assert f"note: the catalogue: its calibration was {before['facts']['calibration']}, and is " in shown
    assert main(["plan", job, "--lock", *settings]) == 0
    after = json.loads(Path("job.lock").read_text())
    assert after["plan"] == before["plan"] and after["without_lines"] != before["without_lines"]
